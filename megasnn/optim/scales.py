"""Learning rate factors of parameters: `--layer-decay` and `--lr-scale`."""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase

from megasnn.config.optimizer import OptimizerConfig
from megasnn.models.description import ModelDescription


def learning_rate_scales(config: OptimizerConfig, description: ModelDescription) -> dict[str, float]:
    """Factor of the learning rate for each trained parameter of the whole model, by global name.

    The layer groups with parameters are numbered 0 to L - 1 from input to output. A parameter of group i takes the
    factor layer_decay ** (L - 1 - i), as in timm's `param_groups_layer_decay`: the head 1, the block before it
    layer_decay, the stem the smallest. Tied parameters belong to the layer that owns them. The factors of `--lr-scale`
    multiply this. All factors follow from the whole model, so they are the same on every layout.

    Raises:
        ValueError: a pattern of `--lr-scale` matches no trained parameter.
    """
    depths = _depths(description)
    last = max(depths.values(), default=0)
    names = [each.name for each in description.tensors if each.is_parameter and each.tensor.requires_grad]
    scales = {name: config.layer_decay ** (last - depths[_layer_of(name, depths)]) for name in names}
    for pattern, factor in config.name_scales.items():
        matched = [name for name in names if fnmatchcase(name, pattern)]
        if not matched:
            examples = ", ".join([*names[:3], "...", *names[-1:]])
            raise ValueError(
                f"--lr-scale {pattern}={factor:g} matches no trained parameter of the model, which are {examples}"
            )
        for name in matched:
            scales[name] *= factor
    return scales


def _depths(description: ModelDescription) -> dict[str, int]:
    """Number of the layer group of each layer that has parameters, by layer name."""
    number_of_group: dict[str, int] = {}
    depths: dict[str, int] = {}
    for layer in description.layers:
        if layer.parameters:
            depths[layer.name] = number_of_group.setdefault(layer.layer_group, len(number_of_group))
    return depths


def _layer_of(name: str, layers: Mapping[str, int]) -> str:
    """Layer that owns a parameter: the longest layer name that begins the parameter's."""
    while name and name not in layers:
        name = name.rpartition(".")[0]
    return name
