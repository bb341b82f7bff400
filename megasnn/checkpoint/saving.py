"""Saving a run: model, optimizer and progress, as global tensors that any layout can load.

Every function is collective over `process_group` (the group of all ranks; None for a process on its own), and
every rank passes only what it holds.
"""

from __future__ import annotations

import json
import os
import platform
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

import megasnn
from megasnn.checkpoint import folder as folders
from megasnn.checkpoint.checksum import file_checksum
from megasnn.checkpoint.description import FileFacts, Metadata, require_model_name
from megasnn.checkpoint.files import PieceWriter
from megasnn.checkpoint.optimizer_state import PREFIX, describe
from megasnn.checkpoint.pieces import COPY, DCP_METADATA, PIECES, SavedTensor, by_file, file_checksum_of
from megasnn.checkpoint.planner import PieceSavePlanner
from megasnn.comm.agreement import all_do, first_decides, gather, is_first
from megasnn.files.described import open_within
from megasnn.files.problems import CheckpointError, problem_list
from megasnn.sharding import ShardedTensor

PathLike = str | os.PathLike[str]
Group = dist.ProcessGroup | None

# A process on its own saves without torch.distributed, which torch finds worth a warning each time.
warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)


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
        tensors: this rank's parameters and buffers (`megasnn.sharding.sharded_tensors`).
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
    kind = type(optimizer).__name__ if optimizer is not None else None
    return write_checkpoint(folder, progress, entries, kind, process_group)


def write_checkpoint(
    folder: PathLike,
    progress: Progress,
    entries: Sequence[ShardedTensor],
    optimizer: str | None,
    process_group: Group,
) -> Path:
    """`save_checkpoint` of tensors that are all described, the optimizer's state (of this kind) among them."""
    root = Path(folder)

    def names_of_all() -> list[str]:
        for label in ("extra", "config", "layout"):
            _require_json(label, getattr(progress, label))
        require_model_name(progress.model)
        return [entry.name for entry in entries]

    mine = all_do(process_group, names_of_all, "this run cannot be saved:")
    names = set[str]().union(*gather(process_group, mine))
    aside = first_decides(process_group, lambda: folders.begin(root, progress.iteration))
    try:
        planner = PieceSavePlanner(entries, names)
        written = _write(aside, planner, process_group)

        def commit() -> Path:
            return folders.commit(root, describe_written(progress, optimizer, aside, written), progress.best)

        return first_decides(process_group, commit)
    except CheckpointError:
        if is_first(process_group):
            folders.discard(root, progress.iteration)
        raise


def describe_written(
    progress: Progress, optimizer: str | None, aside: Path, written: Sequence[SavedTensor]
) -> Metadata:
    """What `metadata.json` says of the files written to `aside`."""
    sums = {name: file_checksum_of(piece for piece, _ in pieces) for name, pieces in by_file(written).items()}
    for name in (PIECES, DCP_METADATA):
        with open_within(aside, name) as stream:
            sums[name] = file_checksum(stream)
    return Metadata(
        iteration=progress.iteration,
        consumed_samples=progress.consumed_samples,
        config=progress.config,
        layout=progress.layout,
        extra=progress.extra,
        optimizer=optimizer,
        tensors={tensor.name: tensor.facts for tensor in written if not tensor.name.startswith(COPY)},
        files={
            name: FileFacts((aside / name).stat().st_size, f"{checksum:08x}") for name, checksum in sorted(sums.items())
        },
        versions=_versions(),
        model=progress.model,
    )


def _write(path: Path, planner: PieceSavePlanner, process_group: Group) -> Sequence[SavedTensor]:
    """What has been written, on the first rank. Failures of torch become one error, on every rank."""
    writer = PieceWriter(path)
    try:
        dcp.save(
            {},
            storage_writer=writer,
            planner=planner,
            process_group=process_group,
            no_dist=process_group is None,
        )
        return writer.tensors
    except CheckpointException as failure:
        problems = [text for rank, (error, _) in failure.failures.items() for text in _texts(rank, error)]
        raise problem_list(f"cannot write the checkpoint {path}:", problems) from None


def _texts(rank: int, error: BaseException) -> list[str]:
    if isinstance(error, CheckpointError):
        return list(error.args)
    return [f"rank {rank}: {type(error).__name__}: {error}"]


def _versions() -> dict[str, str]:
    return {"megasnn": megasnn.__version__, "torch": torch.__version__, "python": platform.python_version()}


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
