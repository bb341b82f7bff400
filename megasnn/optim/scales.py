"""Learning rate factors per parameter: `--layer-decay` and `--lr-scale`."""

from __future__ import annotations

from fnmatch import fnmatchcase

from megasnn.config.optimizer import OptimizerConfig
from megasnn.models.description import ModelDescription


def scale_problems(config: OptimizerConfig, description: ModelDescription) -> list[str]:
    """Patterns of `--lr-scale` that match no trained parameter."""
    names = _trained_names(description)
    problems = []
    for pattern, factor in config.name_scales.items():
        if not any(fnmatchcase(name, pattern) for name in names):
            examples = ", ".join([*names[:3], "...", *names[-1:]])
            problems.append(
                f"--lr-scale {pattern}={factor:g} matches no trained parameter of the model, which are {examples}"
            )
    return problems


def learning_rate_scales(config: OptimizerConfig, description: ModelDescription) -> dict[str, float]:
    """Factor by global name, for the whole model's trained parameters.

    Layer groups with parameters are numbered 0 to L - 1 from input to output. Group i takes
    layer_decay ** (L - 1 - i), as in timm's `param_groups_layer_decay`. Tied parameters count for the layer that owns
    them. `--lr-scale` multiplies this.
    """
    number_of_group: dict[str, int] = {}
    depths: dict[str, int] = {}
    for each in description.layers:
        if each.parameters:
            depths[each.name] = number_of_group.setdefault(each.layer_group, len(number_of_group))
    last = max(depths.values(), default=0)
    patterns = config.name_scales
    scales = {}
    for name in _trained_names(description):
        layer = name
        # A layer's name is the beginning of its tensors' names.
        while layer and layer not in depths:
            layer = layer.rpartition(".")[0]
        scale = config.layer_decay ** (last - depths[layer])
        for pattern, factor in patterns.items():
            if fnmatchcase(name, pattern):
                scale *= factor
        scales[name] = scale
    return scales


def _trained_names(description: ModelDescription) -> list[str]:
    return [each.name for each in description.tensors if each.is_parameter and each.tensor.requires_grad]
