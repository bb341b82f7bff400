"""Saving a run: model, optimizer and progress, as global tensors that any layout can load.

Every function is collective over `process_group` (the group of all ranks; None for a process on its own), and
every rank passes only what it holds.
"""

from __future__ import annotations

import json
import os
import platform
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import megasnn
from megasnn.checkpoint import folder as folders
from megasnn.checkpoint.format import Box, Metadata, Progress, SavedFile, SavedTensor, covers_once
from megasnn.checkpoint.optimizer_state import LocalState
from megasnn.checkpoint.tensor_io import LocalBox, boxes_of, write_safetensors
from megasnn.files.problems import CheckpointError, problem_list
from megasnn.parallel.agreement import broadcast_result, first_gathers, is_first, rank_in, run_on_all_ranks
from megasnn.parallel.sharding import Shard, ShardedTensor

PathLike = str | os.PathLike[str]
Group = dist.ProcessGroup | None


@dataclass(frozen=True)
class Written:
    """The file that a rank has written, and the boxes in it."""

    file: str
    facts: SavedFile
    boxes: Sequence[LocalBox]


def save_checkpoint(
    folder: PathLike, progress: Progress, state: LocalState, process_group: Group = None, best: bool = False
) -> Path:
    """Writes `<folder>/iter_<iteration>` and makes it the latest; an older one of this iteration is replaced.

    Args:
        progress: that of the group's first rank is written.
        best: whether it becomes the folder's best checkpoint by validation, too.

    Raises:
        CheckpointError: on every rank, when a tensor cannot be described, the ranks together do not hold each
            element of a tensor exactly once, or writing fails (names rank and cause). Earlier ones stay.
    """
    boxes = run_on_all_ranks(
        process_group, lambda: boxes_of(written_here(state.entries())), "this run cannot be saved:"
    )

    def write(path: Path) -> Written | None:
        mine = [box for box, _, _ in boxes]
        values = (piece.of_local(entry.tensor.detach()) for _, entry, piece in boxes)
        return Written(path.name, write_safetensors(path, mine, values), mine) if mine else None

    return write_checkpoint(folder, progress, kind_of(state.optimizer), write, process_group, best)


def save_global_tensors(
    folder: PathLike, tensors: Mapping[str, Tensor], *, iteration: int = 0, **progress: Any
) -> Path:
    """Writes whole tensors, in one process, as a checkpoint of weights only; load it with --finetune.

    Args:
        progress: further fields of `Progress`.
    """
    whole = [ShardedTensor(name, value, Shard(tuple(value.shape)), False) for name, value in tensors.items()]
    return save_checkpoint(folder, Progress(iteration, **progress), LocalState(whole))


def write_checkpoint(
    folder: PathLike,
    progress: Progress,
    optimizer: str | None,
    write: Callable[[Path], Written | None],
    process_group: Group,
    best: bool = False,
) -> Path:
    """`save_checkpoint` of what `write` writes.

    Args:
        optimizer: class name of the one whose state is among it.
        write: writes this rank's file, none where it has nothing to write.
    """
    root = Path(folder)
    rank = rank_in(process_group)
    metadata = run_on_all_ranks(process_group, lambda: new_metadata(progress, optimizer), "this run cannot be saved:")
    aside = broadcast_result(process_group, lambda: folders.begin(root, progress.iteration))
    title = f"cannot write the checkpoint {aside}:"

    def written() -> Written | None:
        try:
            return write(aside / file_name(rank))
        except Exception as error:
            raise CheckpointError(f"rank {rank}: {type(error).__name__}: {error}") from None

    try:
        ranks = first_gathers(process_group, run_on_all_ranks(process_group, written, title))
        return broadcast_result(process_group, lambda: commit(root, metadata, list(filter(None, ranks)), best))
    except CheckpointError:
        if is_first(process_group):
            folders.discard(root, progress.iteration)
        raise


def new_metadata(progress: Progress, optimizer: str | None) -> Metadata:
    """The description of a checkpoint, but for tensors and files. Raises CheckpointError for what JSON cannot say."""
    for label in ("extra", "config", "layout"):
        try:
            json.dumps(getattr(progress, label), allow_nan=False)
        except (TypeError, ValueError) as error:
            raise CheckpointError(f"{label} cannot be written as JSON: {error}") from None
    versions = {"megasnn": megasnn.__version__, "torch": str(torch.__version__), "python": platform.python_version()}
    return Metadata(**vars(progress), optimizer=optimizer, versions=versions)


def commit(
    root: Path, metadata: Metadata, ranks: Sequence[Written], best: bool = False, copies: Iterable[Box] = ()
) -> Path:
    """Makes a checkpoint of the files that the ranks have written.

    Args:
        metadata: without tensors and files.
        copies: boxes that are in these files once more.
    Raises:
        CheckpointError: a tensor is written in part, twice, or with different descriptions (names all).
    """
    found: dict[str, list[LocalBox]] = defaultdict(list)
    places: dict[str, list[Box]] = defaultdict(list)
    for written in ranks:
        for box in written.boxes:
            found[box.tensor].append(box)
            places[box.tensor].append(box.in_file(written.file))
    for copy in copies:
        places[copy.name].append(copy)
    problems = set()
    for name, boxes in found.items():
        if len(described := {(box.shape, box.dtype) for box in boxes}) > 1:
            problems.add(f"{name}: ranks describe it as {' and as '.join(map(str, sorted(described)))}")
        elif not covers_once(boxes[0].shape, [(box.offsets, box.sizes) for box in boxes]):
            elements = sum(prod(box.sizes) for box in boxes)
            problems.add(f"{name}: ranks would write {elements} elements of {prod(boxes[0].shape)}, or some twice")
    if problems:
        title = f"cannot write the checkpoint of iteration {metadata.iteration}:"
        raise problem_list(title, problems)
    tensors = {
        name: SavedTensor(found[name][0].shape, found[name][0].dtype, tuple(places[name])) for name in sorted(found)
    }
    files = {written.file: written.facts for written in ranks}
    return folders.commit(root, Metadata(**{**vars(metadata), "tensors": tensors, "files": files}), best)


def file_name(rank: int) -> str:
    return f"rank_{rank:05d}.safetensors"


def written_here(entries: Iterable[ShardedTensor]) -> list[ShardedTensor]:
    """The tensors that this rank writes, of those that it holds; of which it owns no row, it writes nothing."""
    return [entry for entry in entries if entry.shard.is_primary() and entry.shard.pieces()]


def kind_of(optimizer: torch.optim.Optimizer | None) -> str | None:
    return type(optimizer).__name__ if optimizer is not None else None
