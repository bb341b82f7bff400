"""Saving a run: model, optimizer and progress, as global tensors that any layout can load.

Every function is collective over `process_group` (the group of all ranks; None for a process on its own), and
every rank passes its own part.

A save happens at once, or by a thread from a copy. A failed one does not end the run.
"""

from __future__ import annotations

import datetime
import os
import platform
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megasnn.checkpoint import folder as folders
from megasnn.checkpoint.folder import name_best, prune
from megasnn.checkpoint.format import Metadata, Progress, SavedFile, SavedTensor, uncovered
from megasnn.checkpoint.optimizer_state import LocalState
from megasnn.checkpoint.tensor_io import FileContent, boxes_of, write_safetensors
from megasnn.common.files import CheckpointError, raise_problems
from megasnn.common.version import VERSION
from megasnn.parallel.agreement import broadcast_result, gather, rank_in, run_on_all_ranks
from megasnn.parallel.sharding import Shard, ShardedTensor

PathLike = str | os.PathLike[str]
Written = tuple[str, SavedFile, list[tuple[str, SavedTensor]]]
"""A file that was written, and the boxes in it, each with its tensor's name."""
# Ranks wait for each other as long as the slowest disk takes. megasnn.parallel.faults ends them when one is lost.
_PATIENCE = datetime.timedelta(days=7)


def save_checkpoint(
    folder: PathLike, progress: Progress, state: LocalState, process_group: dist.ProcessGroup | None = None
) -> Path:
    """Writes `<folder>/iter_<iteration>` and makes it the latest; see `megasnn.checkpoint.folder` for an older one.

    The progress of the group's first rank is written. Raises CheckpointError on every rank, when a tensor cannot be
    described, the ranks do not hold each element of it, or writing fails (names rank and cause). Earlier ones stay.
    """
    kind = kind_of(state.optimizer)
    return write_checkpoint(folder, progress, kind, lambda: file_content(state.entries(), process_group), process_group)


def save_global_tensors(
    folder: PathLike, tensors: Mapping[str, Tensor], *, iteration: int = 0, **progress: Any
) -> Path:
    """Writes full tensors, in one process, as a checkpoint of weights only; load it with --finetune.

    Args:
        progress: further fields of `Progress`.
    """
    full = [ShardedTensor(name, value, Shard(tuple(value.shape)), False) for name, value in tensors.items()]
    return save_checkpoint(folder, Progress(iteration, **progress), LocalState(full))


def file_content(entries: Iterable[ShardedTensor], process_group: dist.ProcessGroup | None) -> FileContent:
    """Content of this rank's file. Of the ranks that hold the same, one writes it."""
    mine = [entry for entry in entries if entry.shard.is_primary()]
    return boxes_of(mine, file_name(rank_in(process_group)))


def write_checkpoint(
    folder: PathLike,
    progress: Progress,
    optimizer: str | None,
    make: Callable[[], FileContent],
    process_group: dist.ProcessGroup | None,
) -> Path:
    """`save_checkpoint` of what `make` returns, empty where this rank has nothing to write."""
    root, rank = Path(folder), rank_in(process_group)
    content = run_on_all_ranks(process_group, make, "this run cannot be saved:")
    versions = {"megasnn": VERSION, "torch": str(torch.__version__), "python": platform.python_version()}
    metadata = Metadata(**vars(progress), optimizer=optimizer, versions=versions)
    aside = broadcast_result(process_group, lambda: _on_disk(lambda: folders.begin(root, progress.iteration)))

    def write() -> Written | None:
        try:
            return write_file(aside, rank, content) if content else None
        except Exception as error:
            raise CheckpointError(f"rank {rank}: {type(error).__name__}: {error}") from None

    try:
        mine = run_on_all_ranks(process_group, write, f"cannot write the checkpoint {aside}:")
        written = gather(process_group, mine)
        files = list(filter(None, written))
        return broadcast_result(process_group, lambda: _on_disk(lambda: commit_checkpoint(root, metadata, files)))
    except Exception:
        if rank == 0:
            folders.discard(root, progress.iteration)
        raise


def _on_disk(work: Callable[[], Path]) -> Path:
    """Raises CheckpointError where the file system refuses, or JSON lacks a value."""
    try:
        return work()
    except CheckpointError:
        raise
    except (OSError, TypeError, ValueError) as error:
        raise CheckpointError(f"{type(error).__name__}: {error}") from None


def write_file(aside: Path, rank: int, content: FileContent) -> Written:
    """Writes the file of a rank. Raises OSError."""
    file = file_name(rank)
    return file, write_safetensors(aside / file, content), [(name, saved) for name, saved, _ in content]


def commit_checkpoint(root: Path, metadata: Metadata, written: Sequence[Written]) -> Path:
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
        elif (problem := uncovered(saved)) is not None:
            problems.append(f"{name}: {problem}")
    raise_problems(f"cannot write the checkpoint of iteration {metadata.iteration}:", problems)
    files = {file: facts for file, facts, _ in written}
    return folders.commit_folder(root, Metadata(**{**vars(metadata), "tensors": tensors, "files": files}))


def file_name(rank: int) -> str:
    return f"rank_{rank:05d}.safetensors"


def kind_of(optimizer: torch.optim.Optimizer | None) -> str | None:
    return type(optimizer).__name__ if optimizer is not None else None


class Writer:
    """One rank's part in saving a run's checkpoints. Making one, `save` and `finish` are collective.

    Args:
        process_group: as for `save_checkpoint`.
        background: copies the tensors into memory of the CPU, and lets a thread write the copy while training goes on.
        keep_last, keep_every: which checkpoints stay; see `prune`.
        report: takes lines for the user; may be called from another thread. Only the first rank calls it.
        complete: the same for iteration and path of each checkpoint that is complete.
        saved: an iteration that is in the folder already, as it would be saved now.
    Attributes:
        saved: the iteration that was saved last; None before the first.
        failed: the last save that was asked for has failed. The same on every rank after `finish`.
    """

    def __init__(
        self,
        folder: Path,
        *,
        process_group: dist.ProcessGroup | None,
        background: bool = False,
        keep_last: int | None = None,
        keep_every: int | None = None,
        report: Callable[[str], None] = print,
        complete: Callable[[int, Path], None] = lambda iteration, path: None,
        saved: int | None = None,
    ) -> None:
        if background and process_group is not None:  # a group of its own: the thread's collectives run beside training
            ranks = dist.get_process_group_ranks(process_group)
            process_group = dist.new_group(ranks, _PATIENCE, backend="gloo")
            dist.barrier(process_group)  # making a group does not wait for its members
        self._folder, self._group, self._background = folder, process_group, background
        self._keep_last, self._keep_every = keep_last, keep_every
        self._report, self._complete = report, complete
        self.saved, self.failed = saved, False
        self._thread = threading.Thread()
        self._tensors, self._planned = list[tuple[int, int]](), (list[ShardedTensor](), FileContent())
        self._layout: object = None
        self._copies = list[Tensor]()

    def save(self, progress: Progress, state: LocalState, best: bool = False) -> None:
        """Saves, unless this iteration is saved already and has not become the best since.

        When it returns, tensors may be changed. A failure is told and remembered; the next save tries again.
        """
        if self.busy:
            self._tell("the checkpoint before is still being written: waiting for it")
        self.finish()
        if self.saved == progress.iteration and not best:
            return
        kind = kind_of(state.optimizer)
        if not self._background:
            self._attempt(progress, kind, lambda: self._content(state), best)
            return
        staged = Future[FileContent]()
        try:
            staged.set_result(self._staged(state))
        except Exception as error:  # fails the save on all ranks
            staged.set_exception(error)

        def write() -> None:
            _lower_priority()
            self._attempt(progress, kind, staged.result, best)

        self._thread = threading.Thread(target=write, name="megasnn-save", daemon=True)
        self._thread.start()

    @property
    def busy(self) -> bool:
        """True while a save is being written in the background."""
        return self._thread.is_alive()

    def finish(self, seconds: float | None = None) -> None:
        """Waits for a save in the background; no longer than so many seconds."""
        if self._thread.ident is not None:
            self._thread.join(seconds)

    def close(self) -> None:
        """Ends the work beside training. A save that is being written is lost."""
        if self._background and self._group is not None and not self.busy:
            dist.destroy_process_group(self._group)
            self._group = None

    def _content(self, state: LocalState) -> FileContent:
        """Content of this rank's file. It is kept while the tensors stay the same objects in the same memory."""
        entries = state.entries()
        tensors = [(id(each.tensor), each.tensor.data_ptr()) for each in entries]
        if tensors != self._tensors:
            content = file_content(entries, self._group)
            self._tensors, self._planned = tensors, (entries, content)  # with the entries, so that no id is given anew
        return self._planned[1]

    def _staged(self, state: LocalState) -> FileContent:
        """`_content` with a copy of the values in memory of the CPU, pinned for those of a GPU, which is kept for the
        next save. It has their strides: a copy that changes the order of memory takes several times as long."""
        content = self._content(state)
        values = [value for _, _, value in content]
        layout = [(each.shape, each.dtype, each.stride()) for each in values]
        if layout != self._layout:
            self._copies = [torch.empty_like(each, device="cpu", pin_memory=each.is_cuda) for each in values]
            self._layout = layout
        if values:  # in one call
            torch._foreach_copy_(self._copies, values, non_blocking=True)
        if any(each.is_cuda for each in values):
            torch.cuda.current_stream().synchronize()
        return [(name, saved, copy) for (name, saved, _), copy in zip(content, self._copies, strict=True)]

    def _attempt(self, progress: Progress, kind: str | None, make: Callable[[], FileContent], best: bool) -> None:
        began = time.monotonic()
        try:
            path = write_checkpoint(self._folder, progress, kind, make, self._group)
            if best:
                broadcast_result(self._group, lambda: name_best(self._folder, progress.iteration))
        except Exception as error:
            self.failed = True
            reason = str(error) if isinstance(error, CheckpointError) else f"{type(error).__name__}: {error}"
            self._tell(
                f"WARNING: the checkpoint of iteration {progress.iteration} was NOT SAVED; the run goes on and tries "
                f"again at the next interval. {reason}"
            )
            return
        self.failed, self.saved = False, progress.iteration
        self._tell(f"saved {path} in {time.monotonic() - began:.1f} s")
        if rank_in(self._group) == 0:
            self._complete(progress.iteration, path)
            self._prune()

    def _prune(self) -> None:
        try:
            for path in prune(self._folder, self._keep_last, self._keep_every):
                self._tell(f"removed {path} (--keep-last {self._keep_last})")
        except OSError as error:
            self._tell(f"WARNING: cannot remove checkpoints that are no longer kept: {error}")

    def _tell(self, text: str) -> None:
        if rank_in(self._group) == 0:
            self._report(text)


def _lower_priority() -> None:
    """Leaves the cores to training: this thread, and those it starts, get a tenth of a core where none is free."""
    if sys.platform == "linux":  # where a thread has a priority of its own
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 10)
