"""Which parameters are trained, at which rate and with which weight decay: by patterns of their global names."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from megasnn.config.checks import flag
from megasnn.config.fields import Pattern, last_match
from megasnn.config.optimizer import OptimizerConfig
from megasnn.parallel.sharding import ShardedTensor


def is_frozen(config: OptimizerConfig, name: str) -> bool:
    """Whether `--lr-scale-of` gives this parameter a rate of 0."""
    return config.lr_scale(name) == 0


def parameter_groups(tensors: Sequence[ShardedTensor], config: OptimizerConfig) -> list[dict[str, Any]]:
    """The trained ones of these parameters, in groups with their `weight_decay` and `lr_scale`.

    The groups of what decays and of what does not come first, and are there without parameters too: a pipeline stage
    may hold none.
    """
    groups: dict[tuple[float, float], list[Tensor]] = {(config.weight_decay, 1.0): [], (0.0, 1.0): []}
    for entry in tensors:
        if entry.is_parameter and entry.tensor.requires_grad:
            key = config.decay_of(len(entry.shard.global_shape)), config.lr_scale(entry.name)
            groups.setdefault(key, []).append(entry.tensor)
    return [{"params": held, "weight_decay": decay, "lr_scale": scale} for (decay, scale), held in groups.items()]


def require_matches(config: OptimizerConfig, names: Sequence[str]) -> None:
    """Raises ValueError where a pattern has no effect on the parameters of a model, or none of them is trained."""
    patterns = config.lr_scale_patterns()
    chosen = [last_match(patterns, name) for name in names]
    for pattern in patterns:
        if pattern not in chosen:
            raise ValueError(_without_effect("lr_scale_of", pattern, names))
    if all(is_frozen(config, name) for name in names):
        raise ValueError(f"--lr-scale-of {config.lr_scale_of} leaves no parameter to train")


def _without_effect(field: str, pattern: Pattern, names: Sequence[str]) -> str:
    layers = ", ".join(dict.fromkeys(name.split(".")[0] for name in names))
    return (
        f"{flag(field)}: {pattern.text!r} matches no parameter, or only those that a later pattern matches too; names "
        f"are like {names[0]} and {names[-1]} (they begin with {layers})"
    )
