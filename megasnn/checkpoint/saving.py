"""Saving a run: model, optimizer and progress, as global tensors that any layout can load.

Every function is collective over `process_group` (the group of all ranks; None for a process on its own), and
every rank passes only what it holds.
"""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ParamSpec, Protocol, TypeVar

import torch
import torch.distributed as dist

import megasnn
from megasnn.checkpoint import folder as folders
from megasnn.checkpoint.complete import Content, complete, file_name
from megasnn.checkpoint.description import Metadata, require_model_name
from megasnn.checkpoint.optimizer_state import PREFIX, describe
from megasnn.checkpoint.piece_file import write_pieces_file
from megasnn.checkpoint.pieces import MOST_VALUES, values_of
from megasnn.checkpoint.planner import content_of, parts_of, pieces_in_memory, pieces_of
from megasnn.comm.agreement import all_do, first_decides, first_gathers, gather, is_first, rank_in
from megasnn.files.problems import CheckpointError, problem_list
from megasnn.sharded_tensors import ShardedTensor

PathLike = str | os.PathLike[str]
Group = dist.ProcessGroup | None
P = ParamSpec("P")
T = TypeVar("T")


@dataclass(frozen=True)
class Progress:
    """What is saved beside tensors, all of it JSON-able.

    Attributes:
        iteration, consumed_samples: how far the run is.
        extra: whatever the training loop keeps.
        config: what defines the model, {"model": {...}, "neuron": {...}}, and must be equal when it is loaded; None
            where it is not known.
        layout: the process grid, for the reader only.
        model: name of the model; None where it is not known.
        best: whether this becomes the folder's best checkpoint by validation.
    """

    iteration: int = 0
    consumed_samples: int = 0
    extra: dict[str, Any] = field(default_factory=dict)
    config: dict[str, Any] | None = None
    layout: dict[str, Any] | None = None
    model: str | None = None
    best: bool = False


def save_checkpoint(
    folder: PathLike,
    *,
    iteration: int,
    consumed_samples: int,
    tensors: Sequence[ShardedTensor],
    optimizer: torch.optim.Optimizer | None,
    extra: dict[str, Any],
    config: dict[str, Any] | None,
    layout: dict[str, Any] | None,
    model: str | None = None,
    process_group: Group = None,
) -> Path:
    """Writes `<folder>/iter_<iteration>` and makes it the latest; an older one of this iteration is replaced.

    Args:
        tensors: this rank's parameters and buffers (`megasnn.sharded_tensors.sharded_tensors`).
        optimizer: whose state is saved; None for weights only.
        extra, config, layout: JSON-able. `config` is what defines the model and must be equal when it is
            loaded; `layout` is for the reader only. Those of the group's first rank are written.
        model: name of the model, which must be the same when it is loaded; None where it is not known.

    Raises:
        CheckpointError: on every rank, when a tensor cannot be described, the ranks together do not hold each
            element of a tensor exactly once, or writing fails (names rank and cause). Earlier ones stay.
    """
    progress = Progress(iteration, consumed_samples, extra, config, layout, model)
    entries = all_do(process_group, lambda: with_optimizer(tensors, optimizer), "this run cannot be saved:")
    return write_checkpoint(folder, progress, kind_of(optimizer), AtOnce(entries, process_group), process_group)


class Writing(Protocol):
    """How the files of one checkpoint are written."""

    def agree(self) -> Content:
        """What all ranks' files hold together; empty on all but the first rank. Collective. Raises CheckpointError."""

    def write(self, aside: Path) -> list[str]:
        """Writes this rank's file into a folder; the checksums of its pieces."""

    def call(self, function: Callable[P, T], *arguments: P.args, **named: P.kwargs) -> T:
        """What the function returns or raises. Called on the first rank only, where it may work in another process."""


class AtOnce:
    """Writes tensors as they are, in this process, while the caller waits."""

    def __init__(self, entries: Sequence[ShardedTensor], process_group: Group) -> None:
        self._entries, self._group = entries, process_group

    def agree(self) -> Content:
        return agree(self._entries, self._group)

    def write(self, aside: Path) -> list[str]:
        mine = written_here(self._entries)
        parts = (parts_of(view) for entry in mine for view in pieces_in_memory(entry))
        return write_pieces_file(aside / file_name(rank_in(self._group)), parts) if mine else []

    def call(self, function: Callable[P, T], *arguments: P.args, **named: P.kwargs) -> T:
        return function(*arguments, **named)


def write_checkpoint(
    folder: PathLike, progress: Progress, optimizer: str | None, writing: Writing, process_group: Group
) -> Path:
    """`save_checkpoint` of tensors that are all described, the optimizer's state (of this kind) among them."""
    root = Path(folder)
    metadata = all_do(process_group, lambda: described(progress, optimizer), "this run cannot be saved:")
    aside = first_decides(process_group, lambda: folders.begin(root, progress.iteration))
    title = f"cannot write the checkpoint {aside}:"
    try:
        try:
            content = writing.agree()
        except CheckpointError as error:
            raise problem_list(title, error.args) from None
        mine = all_do(process_group, lambda: _write_file(writing, aside, rank_in(process_group)), title)
        checksums = first_gathers(process_group, mine)

        def commit() -> Path:
            return writing.call(complete, root, metadata, content, checksums, progress.best)

        return first_decides(process_group, commit)
    except CheckpointError:
        if is_first(process_group):
            folders.discard(root, progress.iteration)
        raise


def described(progress: Progress, optimizer: str | None) -> Metadata:
    """What `metadata.json` will say, but for tensors and files."""
    for label in ("extra", "config", "layout"):
        _require_json(label, getattr(progress, label))
    require_model_name(progress.model)
    return Metadata(
        iteration=progress.iteration,
        consumed_samples=progress.consumed_samples,
        config=progress.config,
        layout=progress.layout,
        extra=progress.extra,
        optimizer=optimizer,
        tensors={},
        files={},
        versions={"megasnn": megasnn.__version__, "torch": str(torch.__version__), "python": platform.python_version()},
        model=progress.model,
    )


def _write_file(writing: Writing, aside: Path, rank: int) -> list[str]:
    """Raises CheckpointError, which names the rank."""
    try:
        return writing.write(aside)
    except Exception as error:
        raise CheckpointError(f"rank {rank}: {type(error).__name__}: {error}") from None


def agree(entries: Sequence[ShardedTensor], process_group: Group) -> Content:
    """What all ranks' files hold together; empty on all but the first rank. Collective.

    Raises:
        CheckpointError: on every rank, when the ranks together do not hold each element of a tensor exactly once.
    """
    mine = pieces_of(written_here(entries), rank_in(process_group))
    ranks = first_gathers(process_group, ([entry.name for entry in entries], mine))
    found = [Content((), b"")]

    def join() -> None:
        names = {name for names, _ in ranks for name in names}
        found.append(content_of([held for _, held in ranks], names))

    first_decides(process_group, join)
    return found[-1]


def require_few_pieces(
    tensors: Sequence[ShardedTensor], optimizer: torch.optim.Optimizer, kinds: Sequence[str], process_group: Group
) -> None:
    """Before there is a step: whether a checkpoint's description will not be too long to be read. Collective.

    Args:
        tensors: this rank's parameters and buffers. kinds: of the state that the optimizer will keep of its parameters.
    Raises:
        CheckpointError: on every rank, when it is too long.
    """
    states = {
        parameter: {kind: torch.zeros(()) if kind == "step" else parameter for kind in kinds}
        for group in optimizer.param_groups
        for parameter in group["params"]
    }
    entries = written_here([*tensors, *describe(tensors, states)])
    own = values_of(pieces_of(entries, rank_in(process_group)))
    values = 1 + sum(gather(process_group, own))  # and what is around them all
    if values > MOST_VALUES:
        raise CheckpointError(
            f"a checkpoint of this run could not be saved: {values} values would describe its pieces, and "
            f"{MOST_VALUES} are read; use more tensor and pipeline ranks, or leave --use-distributed-optimizer out"
        )


def written_here(entries: Iterable[ShardedTensor]) -> list[ShardedTensor]:
    """The tensors that this rank writes, of those that it holds; of which it owns no row, it writes nothing."""
    return [entry for entry in entries if entry.shard.is_primary() and entry.shard.pieces()]


def kind_of(optimizer: torch.optim.Optimizer | None) -> str | None:
    return type(optimizer).__name__ if optimizer is not None else None


def with_optimizer(tensors: Sequence[ShardedTensor], optimizer: torch.optim.Optimizer | None) -> list[ShardedTensor]:
    """A rank's tensors and its optimizer's state so far. Raises CheckpointError for what cannot be described."""
    require_names(tensors)
    return [*tensors, *describe(tensors, optimizer.state if optimizer is not None else {})]


def require_names(tensors: Iterable[ShardedTensor]) -> None:
    names: set[str] = set()
    for entry in tensors:
        if entry.name in names:
            raise CheckpointError(f"two tensors of one rank are called {entry.name}")
        if entry.name.startswith(PREFIX):
            raise CheckpointError(f"{entry.name}: names that start with {PREFIX!r} are the optimizer's")
        names.add(entry.name)


def _require_json(label: str, value: Any) -> None:
    try:
        json.dumps(value, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"{label} cannot be written as JSON: {error}") from None
