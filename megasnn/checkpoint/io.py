"""Saving and loading a run: model, optimizer and progress, as global tensors that any layout can load.

Every function is collective over `process_group` (the group of all ranks; None for a process on its own), and
every rank passes only what it holds. What cannot be loaded is refused on all ranks, with the same words,
before anything of the model or the optimizer has changed. Reading goes straight into the model's memory.
"""

from __future__ import annotations

import json
import os
import platform
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata as DcpMetadata
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

import megasnn
from megasnn.checkpoint import folder as folders
from megasnn.checkpoint.agreement import all_do, first_decides, gather, is_first
from megasnn.checkpoint.compare import model_differences, tensor_differences, unused_tensors
from megasnn.checkpoint.errors import CheckpointError, NoCheckpointError, problem_list, raise_problems
from megasnn.checkpoint.folder import Metadata
from megasnn.checkpoint.optimizer_state import PREFIX, States, allocate, describe
from megasnn.checkpoint.planner import PieceLoadPlanner, PieceSavePlanner, PieceWriter
from megasnn.sharding import Shard, ShardedTensor

PathLike = str | os.PathLike[str]
Group = dist.ProcessGroup | None
T = TypeVar("T")


@dataclass(frozen=True)
class LoadedState:
    """Where the loaded run stood: completed iterations, samples seen, and what was saved as `extra`."""

    iteration: int
    consumed_samples: int
    extra: dict[str, Any]


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
    is_writer: bool = True,
    process_group: Group = None,
) -> Path:
    """Writes `<folder>/iter_<iteration>` and makes it the latest; an older one of this iteration is replaced.

    Args:
        tensors: this rank's parameters and buffers (`megasnn.sharding.sharded_tensors`).
        optimizer: whose state is saved; None for weights only.
        extra, config, layout: JSON-able. `config` is what defines the model and must be equal when it is
            loaded; `layout` is for the reader only. Those of the group's first rank are written.
        is_writer: True on the data-parallel replica that writes (rank 0 of each data-parallel group).

    Raises:
        CheckpointError: on every rank, when a tensor cannot be described, the ranks together do not hold each
            element of a tensor exactly once, or writing fails (names rank and cause). Earlier ones stay.
    """
    root = Path(folder)

    def everything() -> list[ShardedTensor]:
        for label, value in (("extra", extra), ("config", config), ("layout", layout)):
            _require_json(label, value)
        _require_names(tensors)
        return [*tensors, *describe(tensors, optimizer.state if optimizer is not None else {})]

    entries = all_do(process_group, everything, "this run cannot be saved:")
    names = set[str]().union(*gather(process_group, [entry.name for entry in entries]))
    aside = first_decides(process_group, lambda: folders.begin(root, iteration))

    def finish(written: DcpMetadata) -> Path:
        metadata = Metadata(
            iteration=iteration,
            consumed_samples=consumed_samples,
            config=config,
            layout=layout,
            extra=extra,
            optimizer=type(optimizer).__name__ if optimizer is not None else None,
            tensors=_tensor_list(written.state_dict_metadata),
            files=folders.file_sizes(aside),
            versions=_versions(),
        )
        return folders.commit(root, metadata)

    try:
        planner = PieceSavePlanner(entries if is_writer else [], names)
        written = _write(aside, planner, process_group)
        return first_decides(process_group, lambda: finish(written))
    except CheckpointError:
        if is_first(process_group):
            folders.discard(root, iteration)
        raise


def saved_metadata(
    folder: PathLike, step: int | None = None, process_group: Group = None, may_be_missing: bool = False
) -> Metadata | None:
    """What the checkpoint of iteration `step`, or the latest, says of itself, as the first rank sees it.

    Returns:
        None when there is no checkpoint at all and `may_be_missing`; the same on every rank.
    Raises:
        NoCheckpointError, CheckpointError: on every rank, as for `load_checkpoint`.
    """
    try:
        return first_decides(process_group, lambda: folders.read_metadata(folders.find_checkpoint(Path(folder), step)))
    except NoCheckpointError:
        if may_be_missing:
            return None
        raise


def load_checkpoint(
    folder: PathLike,
    *,
    tensors: Sequence[ShardedTensor],
    optimizer: torch.optim.Optimizer | None = None,
    config: dict[str, Any] | None = None,
    step: int | None = None,
    process_group: Group = None,
) -> LoadedState:
    """Loads the checkpoint of iteration `step`, or the latest, into this rank's tensors and optimizer.

    It may come from any layout. The optimizer's state is replaced; its hyperparameters are not touched.

    Args:
        optimizer: None leaves the saved optimizer state aside (--finetune, --no-load-optim).
        config: must equal the saved one; None accepts any model whose tensors fit (--finetune).

    Raises:
        NoCheckpointError: on every rank, when there is no checkpoint at all.
        CheckpointError: on every rank, when this step does not exist, the configuration differs (lists the
            fields), tensors are missing, unexpected, of another shape or of a precision that would be lost,
            the optimizer is of another kind or has no saved state, or files are missing or damaged.
    """
    path = first_decides(process_group, lambda: folders.find_checkpoint(Path(folder), step))
    metadata = all_do(process_group, lambda: folders.read_metadata(path), f"cannot load {path}:")
    title = f"the checkpoint {path} does not fit this run:"

    def prepare() -> tuple[list[ShardedTensor], States]:
        _require_names(tensors)
        if differences := list(model_differences(metadata, config, optimizer)):
            raise CheckpointError(*differences)
        states = allocate(tensors, optimizer, metadata.tensors) if optimizer is not None else {}
        return [*tensors, *describe(tensors, states)], states

    entries, states = all_do(process_group, prepare, title)
    reports = gather(process_group, tensor_differences(metadata.tensors, entries))
    taken = {name for names, _ in reports for name in names}
    unexpected = unused_tensors(metadata.tensors, taken, with_optimizer=optimizer is not None)
    raise_problems(title, [*(problem for _, problems in reports for problem in problems), *unexpected])

    _read(path, entries, process_group)
    if optimizer is not None:
        optimizer.state.update(states)
    return LoadedState(metadata.iteration, metadata.consumed_samples, metadata.extra)


def load_global_tensors(
    folder: PathLike, step: int | None = None, *, prefix: str = "", with_optimizer: bool = False
) -> dict[str, Tensor]:
    """Whole tensors of a checkpoint by global name, on the CPU, in one process; for tools and tests.

    Args:
        prefix: only names that start so.
        with_optimizer: the optimizer's state too.

    Raises:
        CheckpointError: as `load_checkpoint`.
    """
    path = folders.find_checkpoint(Path(folder), step)
    saved = folders.read_metadata(path).tensors
    tensors = {
        name: torch.empty(told["shape"], dtype=getattr(torch, told["dtype"]))
        for name, told in saved.items()
        if name.startswith(prefix) and (with_optimizer or not name.startswith(PREFIX))
    }
    _read(path, _whole(tensors), None)
    return tensors


def save_global_tensors(
    folder: PathLike,
    tensors: Mapping[str, Tensor],
    *,
    iteration: int = 0,
    config: dict[str, Any] | None = None,
    extra: dict[str, Any] | None = None,
) -> Path:
    """Writes whole tensors, in one process, as a checkpoint of weights only; load it with --finetune."""
    return save_checkpoint(
        folder,
        iteration=iteration,
        consumed_samples=0,
        tensors=_whole(tensors),
        optimizer=None,
        extra=extra or {},
        config=config,
        layout=None,
    )


def _whole(tensors: Mapping[str, Tensor]) -> list[ShardedTensor]:
    return [ShardedTensor(name, value, Shard(tuple(value.shape)), False) for name, value in tensors.items()]


def _write(path: Path, planner: PieceSavePlanner, process_group: Group) -> DcpMetadata:
    return _run(
        f"cannot write the checkpoint {path}:",
        lambda: dcp.save(
            {},
            storage_writer=PieceWriter(path),
            planner=planner,
            process_group=process_group,
            no_dist=process_group is None,
        ),
    )


def _read(path: Path, entries: Iterable[ShardedTensor], process_group: Group) -> None:
    planner = PieceLoadPlanner(entries)
    _run(
        f"cannot read the checkpoint {path}:",
        lambda: dcp.load(
            {},
            storage_reader=dcp.FileSystemReader(path),
            planner=planner,
            process_group=process_group,
            no_dist=process_group is None,
        ),
    )


def _run(title: str, operation: Callable[[], T]) -> T:
    """Runs a save or load of torch.distributed.checkpoint; its failures become one error, on every rank."""
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
            return operation()
    except CheckpointException as failure:
        problems = [text for rank, (error, _) in failure.failures.items() for text in _texts(rank, error)]
        raise problem_list(title, problems) from None


def _texts(rank: int, error: BaseException) -> list[str]:
    if isinstance(error, CheckpointError):
        return list(error.args)
    return [f"rank {rank}: {type(error).__name__}: {error}"]


def _versions() -> dict[str, str]:
    return {"megasnn": megasnn.__version__, "torch": torch.__version__, "python": platform.python_version()}


def _tensor_list(saved: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    return {
        name: {"shape": list(told.size), "dtype": str(told.properties.dtype).removeprefix("torch.")}
        for name, told in sorted(saved.items())
        if isinstance(told, TensorStorageMetadata)
    }


def _require_names(tensors: Iterable[ShardedTensor]) -> None:
    names: set[str] = set()
    for entry in tensors:
        if entry.name in names:
            raise CheckpointError(f"two tensors of one rank are called {entry.name}")
        if entry.name.startswith(PREFIX):
            raise CheckpointError(f"{entry.name}: names that start with {PREFIX!r} are the optimizer's")
        names.add(entry.name)


def _require_json(label: str, value: Any) -> None:
    try:
        json.dumps(value)
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"{label} cannot be written as JSON: {error}") from None
