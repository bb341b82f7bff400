"""Learning rate factors per parameter: `--layer-decay` and `--lr-scale`."""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase

from megasnn.config.optimizer import OptimizerConfig
from megasnn.models.description import ModelDescription


def learning_rate_scales(config: OptimizerConfig, description: ModelDescription) -> dict[str, float]:
    """Factor by global name, for the whole model's trained parameters.

    Layer groups with parameters are numbered 0 to L - 1 from input to output. Group i takes
    layer_decay ** (L - 1 - i), as in timm's `param_groups_layer_decay`. Tied parameters count for the layer that owns
    them. `--lr-scale` multiplies this.

    Raises ValueError if an `--lr-scale` pattern matches no trained parameter.
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
    """Layer group number, by name of each layer with parameters."""
    number_of_group: dict[str, int] = {}
    depths: dict[str, int] = {}
    for layer in description.layers:
        if layer.parameters:
            depths[layer.name] = number_of_group.setdefault(layer.layer_group, len(number_of_group))
    return depths


def _layer_of(name: str, layers: Mapping[str, int]) -> str:
    """The longest layer name among a parameter's prefixes."""
    while name and name not in layers:
        name = name.rpartition(".")[0]
    return name
