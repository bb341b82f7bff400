"""Saving a run: model, optimizer and progress, as global tensors that any layout can load.

Every function is collective over `process_group` (the group of all ranks; None for a process on its own), and
every rank passes its own part.
"""

from __future__ import annotations

import os
import platform
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import megasnn
from megasnn.checkpoint import folder as folders
from megasnn.checkpoint.format import Metadata, Progress, SavedFile, SavedTensor, covers_once
from megasnn.checkpoint.optimizer_state import LocalState
from megasnn.checkpoint.tensor_io import Content, boxes_of, write_safetensors
from megasnn.files import CheckpointError, raise_problems
from megasnn.parallel.agreement import broadcast_result, gather, rank_in, run_on_all_ranks
from megasnn.parallel.sharding import Shard, ShardedTensor

PathLike = str | os.PathLike[str]
Group = dist.ProcessGroup | None
Written = tuple[str, SavedFile, list[tuple[str, SavedTensor]]]
"""A file that was written, and the boxes in it, each with its tensor's name."""


def save_checkpoint(folder: PathLike, progress: Progress, state: LocalState, process_group: Group = None) -> Path:
    """Writes `<folder>/iter_<iteration>` and makes it the latest; see `megasnn.checkpoint.folder` for an older one.

    The progress of the group's first rank is written. Raises CheckpointError on every rank, when a tensor cannot be
    described, the ranks do not hold each element of it, or writing fails (names rank and cause). Earlier ones stay.
    """
    kind = kind_of(state.optimizer)
    return write_checkpoint(folder, progress, kind, lambda: content_of(state.entries(), process_group), process_group)


def save_global_tensors(
    folder: PathLike, tensors: Mapping[str, Tensor], *, iteration: int = 0, **progress: Any
) -> Path:
    """Writes full tensors, in one process, as a checkpoint of weights only; load it with --finetune.

    Args:
        progress: further fields of `Progress`.
    """
    full = [ShardedTensor(name, value, Shard(tuple(value.shape)), False) for name, value in tensors.items()]
    return save_checkpoint(folder, Progress(iteration, **progress), LocalState(full))


def content_of(entries: Iterable[ShardedTensor], process_group: Group) -> Content:
    """Content of this rank's file. Of the ranks that hold the same, one writes it."""
    mine = [entry for entry in entries if entry.shard.is_primary()]
    return boxes_of(mine, file_name(rank_in(process_group)))


def write_checkpoint(
    folder: PathLike, progress: Progress, optimizer: str | None, make: Callable[[], Content], process_group: Group
) -> Path:
    """`save_checkpoint` of what `make` returns, empty where this rank has nothing to write."""
    root, rank = Path(folder), rank_in(process_group)
    content = run_on_all_ranks(process_group, make, "this run cannot be saved:")
    versions = {"megasnn": megasnn.__version__, "torch": str(torch.__version__), "python": platform.python_version()}
    metadata = Metadata(**vars(progress), optimizer=optimizer, versions=versions)
    aside = broadcast_result(process_group, lambda: folders.begin(root, progress.iteration))

    def write() -> Written | None:
        try:
            return write_file(aside, rank, content) if content else None
        except Exception as error:
            raise CheckpointError(f"rank {rank}: {type(error).__name__}: {error}") from None

    try:
        mine = run_on_all_ranks(process_group, write, f"cannot write the checkpoint {aside}:")
        written = gather(process_group, mine)
        return broadcast_result(process_group, lambda: commit(root, metadata, list(filter(None, written))))
    except CheckpointError:
        if rank == 0:
            folders.discard(root, progress.iteration)
        raise


def write_file(aside: Path, rank: int, content: Content) -> Written:
    """Writes the file of a rank. Raises OSError."""
    file = file_name(rank)
    return file, write_safetensors(aside / file, content), [(name, saved) for name, saved, _ in content]


def commit(root: Path, metadata: Metadata, written: Sequence[Written]) -> Path:
    """Makes a checkpoint of the files that the ranks have written; `metadata` comes without tensors and files.

    A box that lies in several files is a copy. Raises CheckpointError for a tensor that is written in part, or with
    different descriptions.
    """
    parts = defaultdict[str, list[SavedTensor]](list)
    for _, _, boxes in written:
        for name, saved in boxes:
            parts[name].append(saved)
    tensors, problems = {}, []
    for name in sorted(parts):
        described = {(each.shape, each.dtype) for each in parts[name]}
        shape, dtype = next(iter(described))
        tensors[name] = saved = SavedTensor(shape, dtype, tuple(box for each in parts[name] for box in each.boxes))
        if len(described) > 1:
            problems.append(f"{name}: ranks describe it as {' and as '.join(map(str, sorted(described)))}")
        elif not covers_once(shape, held := {(box.offsets, box.sizes) for box in saved.boxes}):
            elements = sum(prod(sizes) for _, sizes in held)
            problems.append(f"{name}: ranks would write {elements} elements of {prod(shape)}, or some twice")
    raise_problems(f"cannot write the checkpoint of iteration {metadata.iteration}:", problems)
    files = {file: facts for file, facts, _ in written}
    return folders.commit(root, Metadata(**{**vars(metadata), "tensors": tensors, "files": files}))


def file_name(rank: int) -> str:
    return f"rank_{rank:05d}.safetensors"


def kind_of(optimizer: torch.optim.Optimizer | None) -> str | None:
    return type(optimizer).__name__ if optimizer is not None else None
