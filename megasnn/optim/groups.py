"""Which parameters are trained, at which rate and with which weight decay: by patterns of their global names."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from megasnn.config.checks import flag
from megasnn.config.optimizer import OptimizerConfig
from megasnn.config.patterns import Pattern, last_match
from megasnn.sharded_tensors import ShardedTensor


def is_frozen(config: OptimizerConfig, name: str) -> bool:
    """Whether `--freeze` names this parameter."""
    return last_match(config.frozen_patterns(), name) is not None


def parameter_groups(tensors: Sequence[ShardedTensor], config: OptimizerConfig) -> list[dict[str, Any]]:
    """The trained ones of these parameters, in groups with their `weight_decay` and `lr_scale`.

    The groups of what decays where no pattern says otherwise, and of what does not, come first, and are there without
    parameters too: a pipeline stage may hold none.
    """
    groups: dict[tuple[float, float], list[Tensor]] = {(config.weight_decay, 1.0): [], (0.0, 1.0): []}
    scales = config.lr_scale_patterns()
    for entry in tensors:
        if entry.is_parameter and entry.tensor.requires_grad:
            pattern = last_match(scales, entry.name)
            key = config.decay_of(entry.name, len(entry.shard.global_shape)), 1.0 if pattern is None else pattern.value
            groups.setdefault(key, []).append(entry.tensor)
    return [{"params": held, "weight_decay": decay, "lr_scale": scale} for (decay, scale), held in groups.items()]


def require_matches(config: OptimizerConfig, names: Sequence[str]) -> None:
    """Raises ValueError where a pattern has no effect on the parameters of a model, or none of them is trained."""
    for pattern in config.frozen_patterns():
        if not any(map(pattern.matches, names)):
            raise ValueError(_without_effect("freeze", pattern, "no parameter", names))
    trained = [name for name in names if not is_frozen(config, name)]
    if not trained:
        raise ValueError(f"--freeze {config.freeze} leaves no parameter to train")
    with_values = {"lr_scale_of": config.lr_scale_patterns(), "weight_decay_of": config.weight_decay_patterns()}
    for field, found in with_values.items():
        chosen = [last_match(found, name) for name in trained]
        for pattern in found:
            if pattern not in chosen:
                what = "no trained parameter, or only those that a later pattern matches too"
                raise ValueError(_without_effect(field, pattern, what, trained))


def _without_effect(field: str, pattern: Pattern, what: str, names: Sequence[str]) -> str:
    layers = ", ".join(dict.fromkeys(name.split(".")[0] for name in names))
    return (
        f"{flag(field)}: {pattern.text!r} matches {what}; names are like {names[0]} and {names[-1]} (they begin with "
        f"{layers})"
    )
