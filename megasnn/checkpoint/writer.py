"""A run's saves, one after the other: at once, or by a thread."""

from __future__ import annotations

import datetime
import os
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from megasnn.checkpoint.folder import name_best, prune
from megasnn.checkpoint.format import Progress
from megasnn.checkpoint.optimizer_state import LocalState
from megasnn.checkpoint.save import file_content, optimizer_name, write_checkpoint
from megasnn.checkpoint.tensor_io import FileContent
from megasnn.common.files import CheckpointError
from megasnn.parallel.agreement import broadcast_result, rank_in
from megasnn.parallel.sharding import ShardedTensor

# Ranks wait for the slowest disk. megasnn.parallel.faults ends them when one is lost.
_PATIENCE = datetime.timedelta(days=7)
_SAVING_PRIORITY = 10
"""Nice value of the saving thread: about a tenth of a core when training needs all of them."""


class Writer:
    """Writes checkpoints, on one rank. The constructor, `save` and `finish` are collective.

    Args:
        process_group: all ranks; None for a single process.
        background: a thread writes a copy from CPU memory while training continues.
        keep_last, keep_every: see `prune`.
        report: receives lines for the user, on the first rank, maybe from another thread.
        complete: receives each complete checkpoint's iteration and path, like `report`.
    Attributes:
        saved_iteration: iteration in the folder with the current state; None before the first save.
        failed: whether the last save failed. The same on every rank after `finish`.
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
        saved_iteration: int | None = None,
    ) -> None:
        if background and process_group is not None:
            # The thread's collectives run beside those of training, so they need another group.
            ranks = dist.get_process_group_ranks(process_group)
            process_group = dist.new_group(ranks, _PATIENCE, backend="gloo")
            # new_group does not wait for the other members.
            dist.barrier(process_group)
        self._folder = folder
        self._group = process_group
        self._background = background
        self._keep_last = keep_last
        self._keep_every = keep_every
        self._report = report
        self._complete = complete
        self.saved_iteration = saved_iteration
        self.failed = False
        self._thread = threading.Thread()
        self._planned_for = list[tuple[int, int]]()
        self._entries = list[ShardedTensor]()
        self._planned = FileContent()
        self._copied_layout: object = None
        self._copies = list[Tensor]()

    def save(self, progress: Progress, state: LocalState, best: bool = False) -> None:
        """Saves, unless this iteration is saved already and has not become the best since.

        Tensors may change after it returns. After a reported failure, the next save tries again.
        """
        if self.busy:
            self._tell("the checkpoint before is still being written: waiting for it")
        self.finish()
        # A best one is written again: a continuing run compares with the accuracy in its metadata.
        if self.saved_iteration == progress.iteration and not best:
            return
        kind = optimizer_name(state.optimizer)
        if not self._background:
            self._attempt(progress, kind, lambda: self._content(state), best)
            return
        staged = Future[FileContent]()
        try:
            staged.set_result(self._staged(state))
        except Exception as error:
            # Fails the save on all ranks.
            staged.set_exception(error)

        def write() -> None:
            if sys.platform == "linux":
                # Elsewhere a thread has no priority apart from its process.
                # Leaves the cores to training: lowers this thread, and any that it starts.
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _SAVING_PRIORITY)
            self._attempt(progress, kind, staged.result, best)

        # A daemon: after an error, the process ends without waiting for a thread that waits for lost ranks.
        self._thread = threading.Thread(target=write, name="megasnn-save", daemon=True)
        self._thread.start()

    @property
    def busy(self) -> bool:
        return self._thread.is_alive()

    def finish(self, seconds: float | None = None) -> None:
        """Waits for a save in progress, at most `seconds`."""
        if self._thread.ident is not None:
            self._thread.join(seconds)

    def close(self) -> None:
        """Ends the thread's group; a save in progress is lost."""
        if self._background and self._group is not None and not self.busy:
            dist.destroy_process_group(self._group)
            self._group = None

    def _content(self, state: LocalState) -> FileContent:
        entries = state.entries()
        # The plan holds while tensors are the same objects in the same memory.
        tensors = [(id(each.tensor), each.tensor.data_ptr()) for each in entries]
        if tensors != self._planned_for:
            self._planned = file_content(entries, self._group)
            self._planned_for = tensors
            self._entries = entries  # keeps the objects alive: an id is not given to another one
        return self._planned

    def _staged(self, state: LocalState) -> FileContent:
        """The content in CPU memory (pinned for a GPU), which the next save reuses."""
        content = self._content(state)
        values = [value for _, _, value in content]
        layout = [(each.shape, each.dtype, each.stride()) for each in values]
        if layout != self._copied_layout:
            # With the strides of the values: a copy into another memory order takes several times as long.
            self._copies = [torch.empty_like(each, device="cpu", pin_memory=each.is_cuda) for each in values]
            self._copied_layout = layout
        if values:
            torch._foreach_copy_(self._copies, values, non_blocking=True)
        if any(each.is_cuda for each in values):
            # Training may overwrite the values after this.
            torch.cuda.current_stream().synchronize()
        return [(name, tensor, copy) for (name, tensor, _), copy in zip(content, self._copies, strict=True)]

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
        self.failed = False
        self.saved_iteration = progress.iteration
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
