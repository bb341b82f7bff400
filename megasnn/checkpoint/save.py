"""Saves global tensors that any layout can load.

Functions with a `process_group` are collective over it (all ranks; None for a single process).
"""

from __future__ import annotations

import os
import platform
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megasnn.checkpoint import folder as folders
from megasnn.checkpoint.format import Box, Metadata, Progress, SavedFile, SavedTensor, uncovered
from megasnn.checkpoint.optimizer_state import LocalState
from megasnn.checkpoint.tensor_io import FileContent, boxes_of, whole_tensors, write_safetensors
from megasnn.common.files import CheckpointError, raise_problems
from megasnn.common.version import VERSION
from megasnn.parallel.agreement import broadcast_result, rank_in, run_and_gather, run_on_all_ranks
from megasnn.parallel.sharding import ShardedTensor

PathLike = str | os.PathLike[str]
Written = tuple[str, SavedFile, list[tuple[str, SavedTensor]]]
"""A written file and its boxes, each with its tensor's name."""


def save_checkpoint(
    folder: PathLike, progress: Progress, state: LocalState, process_group: dist.ProcessGroup | None = None
) -> Path:
    """Writes `<folder>/iter_<iteration>` and makes it the latest; see `megasnn.checkpoint.folder` for an older one.

    The first rank's progress is written.

    Raises:
        CheckpointError: on every rank: a tensor cannot be described, the ranks do not hold each element, or writing
            fails (names rank and cause). Earlier checkpoints stay.
    """
    kind = optimizer_name(state.optimizer)
    return write_checkpoint(folder, progress, kind, lambda: file_content(state.entries(), process_group), process_group)


def save_global_tensors(
    folder: PathLike, tensors: Mapping[str, Tensor], *, iteration: int = 0, **progress: Any
) -> Path:
    """Writes full tensors, in one process, as weights only; load them with --finetune."""
    return save_checkpoint(folder, Progress(iteration, **progress), LocalState(whole_tensors(tensors)))


def file_content(entries: Iterable[ShardedTensor], process_group: dist.ProcessGroup | None) -> FileContent:
    # If several ranks have the same part, one writes it.
    mine = [entry for entry in entries if entry.shard.is_primary()]
    return boxes_of(mine, file_name(rank_in(process_group)))


def write_checkpoint(
    folder: PathLike,
    progress: Progress,
    optimizer: str | None,
    make_content: Callable[[], FileContent],
    process_group: dist.ProcessGroup | None,
) -> Path:
    """As `save_checkpoint`, with content from `make_content`; it is empty on a rank that has only copies."""
    root = Path(folder)
    rank = rank_in(process_group)
    # No folder before all ranks can describe their tensors: a refusal leaves nothing on disk.
    content = run_on_all_ranks(process_group, make_content, "this run cannot be saved:")
    # Every rank describes the run; the first rank's description is written.
    versions = {"megasnn": VERSION, "torch": str(torch.__version__), "python": platform.python_version()}
    metadata = Metadata(**vars(progress), optimizer=optimizer, versions=versions)
    aside = broadcast_result(process_group, lambda: _on_disk(lambda: folders.begin(root, progress.iteration)))

    # The second result is gathered: the first rank describes all files in one metadata.json.
    def write() -> tuple[None, Written | None]:
        if not content:
            return None, None
        try:
            return None, write_file(aside, rank, content)
        except Exception as error:
            raise CheckpointError(f"rank {rank}: {type(error).__name__}: {error}") from None

    try:
        _, written = run_and_gather(process_group, write, f"cannot write the checkpoint {aside}:")
        files = [each for each in written if each is not None]
        return broadcast_result(process_group, lambda: _on_disk(lambda: commit_checkpoint(root, metadata, files)))
    except Exception:
        # The failure is every rank's; the folder is one.
        if rank == 0:
            folders.discard(root, progress.iteration)
        raise


def _on_disk(work: Callable[[], Path]) -> Path:
    """The work's result. Raises CheckpointError if the file system refuses, or JSON lacks a value."""
    try:
        return work()
    except CheckpointError:
        raise
    except (OSError, TypeError, ValueError) as error:
        raise CheckpointError(f"{type(error).__name__}: {error}") from None


def write_file(aside: Path, rank: int, content: FileContent) -> Written:
    file = file_name(rank)
    boxes = [(name, saved) for name, saved, _ in content]
    return file, write_safetensors(aside / file, content), boxes


def commit_checkpoint(root: Path, metadata: Metadata, written: Sequence[Written]) -> Path:
    """Joins all ranks' files. Equal boxes in several files are copies.

    Args:
        metadata: without tensors and files.
    Raises:
        CheckpointError: a tensor is written in part, or ranks describe it differently.
    """
    parts = defaultdict[str, list[SavedTensor]](list)
    for _, _, boxes in written:
        for name, saved in boxes:
            parts[name].append(saved)
    tensors = {}
    problems = []
    for name in sorted(parts):
        descriptions = set()
        all_boxes = list[Box]()
        for part in parts[name]:
            descriptions.add((part.shape, part.dtype))
            all_boxes += part.boxes
        shape, dtype = next(iter(descriptions))
        tensors[name] = SavedTensor(shape, dtype, tuple(all_boxes))
        if len(descriptions) > 1:
            problems.append(f"{name}: ranks describe it as {' and as '.join(map(str, sorted(descriptions)))}")
        elif (problem := uncovered(tensors[name])) is not None:
            problems.append(f"{name}: {problem}")
    raise_problems(f"cannot write the checkpoint of iteration {metadata.iteration}:", problems)
    files = {file: facts for file, facts, _ in written}
    return folders.commit_folder(root, Metadata(**{**vars(metadata), "tensors": tensors, "files": files}))


def file_name(rank: int) -> str:
    return f"rank_{rank:05d}.safetensors"


def optimizer_name(optimizer: torch.optim.Optimizer | None) -> str | None:
    return None if optimizer is None else type(optimizer).__name__
