"""Saves of a run, at once or by a thread from a staged copy. A failed one does not end the run."""

from __future__ import annotations

import datetime
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megasnn.checkpoint.folder import Retention, remove, superfluous
from megasnn.checkpoint.format import Progress
from megasnn.checkpoint.optimizer_state import LocalState
from megasnn.checkpoint.save import Content, Group, content_of, kind_of, save_checkpoint, write_checkpoint
from megasnn.checkpoint.tensor_io import LocalBox
from megasnn.files import CheckpointError
from megasnn.parallel.agreement import rank_in
from megasnn.parallel.sharding import ShardedTensor

# Ranks wait for each other as long as the slowest disk takes. megasnn.engine.faults ends them when one is lost.
_PATIENCE = datetime.timedelta(days=7)


class SyncWriter:
    """One rank's part in saving a run's checkpoints. Making one, `save` and `finish` are collective.

    Args:
        process_group: as for `save_checkpoint`.
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
        process_group: Group,
        retention: Retention | None = None,
        report: Callable[[str], None] = print,
        complete: Callable[[int, Path], None] = lambda iteration, path: None,
        saved: int | None = None,
    ) -> None:
        self._folder, self._retention, self._group = folder, retention or Retention(), process_group
        self._report, self._complete = report, complete
        self.saved, self.failed = saved, False

    def save(self, progress: Progress, state: LocalState, best: bool = False) -> None:
        """Saves, unless this iteration is saved already and has not become the best since.

        When it returns, tensors may be changed. A failure is told and remembered; the next save tries again.
        """
        if self.saved != progress.iteration or best:
            self._attempt(progress, lambda: save_checkpoint(self._folder, progress, state, self._group, best))

    def finish(self, seconds: float | None = None) -> None:
        """Waits for a save in the background; no longer than so many seconds."""

    def close(self) -> None:
        """Ends the work beside training. A save that is being written is lost."""

    @property
    def busy(self) -> bool:
        """True while a save is being written in the background."""
        return False

    def _attempt(self, progress: Progress, save: Callable[[], Path]) -> None:
        began = time.monotonic()
        try:
            path = save()
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
            for path in remove(superfluous(self._folder, self._retention)):
                self._tell(f"removed {path} (--keep-last {self._retention.last})")
        except OSError as error:
            self._tell(f"WARNING: cannot remove checkpoints that are no longer kept: {error}")

    def _tell(self, text: str) -> None:
        if rank_in(self._group) == 0:
            self._report(text)


class AsyncWriter(SyncWriter):
    """Copies the tensors into memory of the CPU, and lets a thread write the copy while training goes on.

    Arguments and attributes as `SyncWriter`.
    """

    def __init__(self, folder: Path, *, process_group: Group, **options: Any) -> None:
        group = process_group
        if group is not None:  # a group of its own, since the thread's collectives run beside those of training
            group = dist.new_group(dist.get_process_group_ranks(group), _PATIENCE, backend="gloo")
            dist.barrier(group)  # making a group does not wait for its members
        super().__init__(folder, process_group=group, **options)
        self._staging, self._thread = StagingBuffer(), threading.Thread()

    def save(self, progress: Progress, state: LocalState, best: bool = False) -> None:
        if self.busy:
            self._tell("the checkpoint before is still being written: waiting for it")
        self.finish()
        if self.saved == progress.iteration and not best:
            return
        problem: Exception | None = None
        try:
            self._staging.copy(state.entries())
        except Exception as error:  # fails the save on all ranks
            problem = error

        def staged() -> Content:
            if problem is not None:
                raise problem
            return self._staging.content()

        def write() -> None:
            _lower_priority()
            kind = kind_of(state.optimizer)
            self._attempt(progress, lambda: write_checkpoint(self._folder, progress, kind, staged, self._group, best))

        self._thread = threading.Thread(target=write, name="megasnn-save", daemon=True)
        self._thread.start()

    @property
    def busy(self) -> bool:
        return self._thread.is_alive()

    def finish(self, seconds: float | None = None) -> None:
        if self._thread.ident is not None:
            self._thread.join(seconds)

    def close(self) -> None:
        if self._group is not None and not self.busy:
            dist.destroy_process_group(self._group)
            self._group = None


class StagingBuffer:
    """Copies of this rank's boxes in memory of the CPU, pinned for those of a GPU; kept for the next save.

    On a GPU, copies are put into the queue in front of whatever changes the tensors later; nothing waits for them.
    """

    def __init__(self) -> None:
        self._boxes: Sequence[LocalBox] = []
        self._copies: list[Tensor] = []
        self._events: list[torch.cuda.Event] = []

    def copy(self, entries: Sequence[ShardedTensor]) -> None:
        boxes, values = content_of(entries)
        values = list(values)
        if self._boxes != boxes:
            self._boxes = boxes
            self._copies = [torch.empty(each.shape, dtype=each.dtype, pin_memory=each.is_cuda) for each in values]
        if values:  # in one call
            torch._foreach_copy_(self._copies, values, non_blocking=True)
        devices = {each.device for each in values if each.is_cuda}
        self._events = [torch.cuda.current_stream(device).record_event() for device in devices]

    def content(self) -> Content:
        """Boxes and copies, once these have come from the GPU."""
        for event in self._events:
            event.synchronize()
        return self._boxes, self._copies


def _lower_priority() -> None:
    """Leaves the cores to training: this thread, and those it starts, get a tenth of a core where none is free."""
    if sys.platform == "linux":  # where a thread has a priority of its own
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 10)
