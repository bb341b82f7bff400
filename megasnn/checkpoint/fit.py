"""Whether a checkpoint's model, optimizer and tensors fit a run."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from megasnn.checkpoint.format import Metadata, SavedTensor, config_differences
from megasnn.common.files import raise_problems
from megasnn.config.training import PRECISIONS
from megasnn.parallel.sharding import ShardedTensor


def model_differences(metadata: Metadata, model: str | None, config: Mapping[str, Any] | None) -> Iterator[str]:
    """Differences from this run's model, in words.

    Args:
        model: None accepts any.
        config: dimensions and neuron; None accepts any model whose tensors fit (--finetune).
    """
    # Weights imported from another program may name no model. Their tensors decide.
    if model is not None and metadata.model not in (None, model):
        yield f"it is a checkpoint of the model {metadata.model}, and this run trains {model}"
    elif config is not None and metadata.config is None:
        yield "it holds weights without a model configuration; load it with --finetune"
    elif config is not None and metadata.config is not None:
        found = list(config_differences(metadata.config, config))
        yield from found
        if found:
            yield "leave the flags out to continue; for a last layer of another shape take --finetune"


def optimizer_differences(metadata: Metadata, optimizer: str | None) -> Iterator[str]:
    """Why an optimizer, by class name, cannot take the saved state."""
    if optimizer is None or metadata.optimizer == optimizer:
        return
    if metadata.optimizer is None:
        yield "it holds no optimizer state; load it with --finetune"
    else:
        yield f"its optimizer state is of {metadata.optimizer}, this run uses {optimizer}; --finetune takes its weights"


@dataclass(frozen=True)
class RankFit:
    """Saved tensors compared with one rank's.

    Attributes:
        problems: one line for each tensor that cannot be loaded.
        used: bit n is set where the rank uses the n-th saved tensor.
    """

    problems: Sequence[str]
    used: int


def compare_tensors(
    saved: Mapping[str, SavedTensor], entries: Iterable[ShardedTensor], used: Collection[str], rounds: bool = False
) -> RankFit:
    """Compares saved tensors with a rank's. A type that would lose digits is a problem, unless `rounds`."""
    problems = []
    for entry in entries:
        described = saved.get(entry.name)
        if described is None:
            problems.append(f"{entry.name}: missing")
        elif described.shape != entry.shard.global_shape:
            problems.append(
                f"{entry.name}: saved with shape {list(described.shape)}, now {list(entry.shard.global_shape)}"
            )
        elif not _keeps_values(getattr(torch, described.dtype), entry.tensor.dtype, rounds):
            able = [name for name, precision in PRECISIONS.items() if precision.weights == described.dtype]
            advice = f"; load it with --precision {' or '.join(able)}" if able else ""
            problems.append(f"{entry.name}: saved as {described.dtype}, {entry.tensor.dtype} cannot hold it{advice}")
    # Bits, because names from thousands of ranks would be long.
    return RankFit(problems, sum(1 << bit for bit, name in enumerate(saved) if name in used))


def _keeps_values(source: torch.dtype, target: torch.dtype, rounds: bool) -> bool:
    if rounds:
        # Floating point becomes integer for counts only.
        return source.is_floating_point == target.is_floating_point or target == torch.int64
    return torch.promote_types(source, target) == target


def require_fit(
    saved: Mapping[str, SavedTensor], fits: Iterable[RankFit], optional: tuple[str, ...], title: str
) -> None:
    """Raises CheckpointError for any rank's problem, and for saved tensors that no rank uses.

    Args:
        optional: prefixes that need no use.
    """
    problems = list[str]()
    used = 0
    for fit in fits:
        problems += fit.problems
        used |= fit.used
    for bit, name in enumerate(saved):
        if not used >> bit & 1 and not name.startswith(optional):
            problems.append(f"{name}: saved, but nothing here takes it")
    raise_problems(title, problems)
