"""The saves of a run: at once or in the background, and a failed one does not end the run."""

from __future__ import annotations

import datetime
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

from megasnn.checkpoint.aside import Aside
from megasnn.checkpoint.folder import Retention, prune
from megasnn.checkpoint.saving import AtOnce, Group, Progress, Writing, kind_of, with_optimizer, write_checkpoint
from megasnn.comm.agreement import all_do, is_first
from megasnn.files.problems import CheckpointError
from megasnn.sharded_tensors import ShardedTensor

# Ranks wait for each other as long as the slowest disk takes. megasnn.engine.faults ends them when one is lost.
_PATIENCE = datetime.timedelta(days=7)


class Saver:
    """One rank's part in saving a run's checkpoints. Making one, `save` and `finish` are collective.

    Args:
        process_group: as for `save_checkpoint`.
        background: write while training goes on; a group of its own lets the ranks agree beside it.
        report: takes lines for the user; may be called from another thread. Only the first rank calls it.
        complete: the same for iteration and path of each checkpoint that is complete.
        saved: an iteration that is in the folder already, as it would be saved now.
    Attributes:
        saved: the iteration that was saved last; None before the first.
        failed: the save that was asked for last has failed. The same on every rank after `finish`.
    """

    def __init__(
        self,
        folder: Path,
        *,
        process_group: Group,
        background: bool = False,
        retention: Retention | None = None,
        report: Callable[[str], None] = print,
        complete: Callable[[int, Path], None] = lambda iteration, path: None,
        saved: int | None = None,
    ) -> None:
        self._folder, self._retention = folder, retention or Retention()
        self._group = process_group
        self._watched: torch.optim.Optimizer | None = None
        if background and process_group is not None:
            self._group = dist.new_group(dist.get_process_group_ranks(process_group), _PATIENCE, backend="gloo")
            dist.barrier(self._group)  # making a group does not wait for its members
        self._aside = Aside(self._group) if background else None
        self._thread: threading.Thread | None = None
        self._in_flight: int | None = None
        self.report, self._complete = report, complete
        self.saved = saved
        self.failed = False

    def prepare(self, tensors: Sequence[ShardedTensor], optimizer: torch.optim.Optimizer | None) -> None:
        """Gets ready for the first save in the background, once the optimizer has its state; otherwise does nothing."""
        if self._aside is not None:
            with suppress(CheckpointError):  # `save` tells it
                self._aside.prepare(with_optimizer(tensors, optimizer))

    def save(
        self, progress: Progress, tensors: Sequence[ShardedTensor], optimizer: torch.optim.Optimizer | None
    ) -> None:
        """Saves, unless this iteration is saved already and has not become the best since.

        In the background, what a forward pass can change is copied before this returns; weights and the optimizer's
        state are copied until `optimizer.step`, which waits for that. Code that changes them in another way calls
        `settle` first. A failure is told and remembered; the next save tries again.
        """
        if self._in_flight is not None:
            if self.busy and self._in_flight != progress.iteration:
                self._tell(f"the checkpoint of iteration {self._in_flight} is still being written: waiting for it")
            self.finish()
        if self.saved == progress.iteration and not progress.best:
            return
        entries, problem = _described(tensors, optimizer)
        save = partial(self._write, progress, kind_of(optimizer), self._aside or AtOnce(entries, self._group), problem)
        if self._aside is None:
            save()
            return
        if problem is None:
            self._aside.take(entries)
        self._settle_before_updates_of(optimizer)
        self._in_flight = progress.iteration
        self._thread = threading.Thread(target=save, name="megasnn-save", daemon=True)
        self._thread.start()

    def settle(self) -> None:
        """Waits until the save in the background has its copies: from here on every tensor may be changed."""
        if self._aside is not None:
            self._aside.settle()

    @property
    def busy(self) -> bool:
        """Whether a save is being written in the background."""
        return self._thread is not None and self._thread.is_alive()

    def finish(self, seconds: float | None = None) -> None:
        """Waits for the save in the background, if there is one; no longer than so many seconds."""
        if self._thread is not None:
            self._thread.join(seconds)
        self._thread = self._in_flight = None

    def close(self) -> None:
        """Ends what works beside training. What it is writing is lost."""
        if self._aside is not None:
            self._aside.close()
            if self._group is not None and not self.busy:
                dist.destroy_process_group(self._group)
                self._group = self._aside = None  # its threads end with the last who holds it

    def _settle_before_updates_of(self, optimizer: torch.optim.Optimizer | None) -> None:
        if optimizer is not None and optimizer is not self._watched:
            optimizer.register_step_pre_hook(lambda *_: self.settle())
            self._watched = optimizer

    def _write(self, progress: Progress, kind: str | None, writing: Writing, problem: CheckpointError | None) -> None:
        """Args: problem: why this rank's tensors cannot be saved."""
        began = time.monotonic()

        def ready() -> None:
            if problem is not None:
                raise problem
            if self._aside is not None:
                self._aside.wait()

        try:
            all_do(self._group, ready, "this run cannot be saved:")
            path = write_checkpoint(self._folder, progress, kind, writing, self._group)
        except Exception as error:
            self.failed = True
            self._tell(
                f"WARNING: the checkpoint of iteration {progress.iteration} was NOT SAVED; the run goes on and tries "
                f"again at the next interval. {_text(error)}"
            )
            return
        self.failed, self.saved = False, progress.iteration
        self._tell(f"saved {path} in {time.monotonic() - began:.1f} s")
        if is_first(self._group):
            self._complete(progress.iteration, path)
        self._prune(writing)

    def _prune(self, writing: Writing) -> None:
        if not is_first(self._group):
            return
        try:
            for path in writing.call(prune, self._folder, self._retention):
                self._tell(f"removed {path} (--keep-last {self._retention.last})")
        except OSError as error:
            self._tell(f"WARNING: cannot remove checkpoints that are no longer kept: {error}")

    def _tell(self, text: str) -> None:
        if is_first(self._group):
            self.report(text)


def _described(
    tensors: Sequence[ShardedTensor], optimizer: torch.optim.Optimizer | None
) -> tuple[list[ShardedTensor], CheckpointError | None]:
    """All that is saved; nothing, and why, where the optimizer's state cannot be described."""
    try:
        return with_optimizer(tensors, optimizer), None
    except CheckpointError as error:
        return [], error


def _text(error: Exception) -> str:
    return str(error) if isinstance(error, CheckpointError) else f"{type(error).__name__}: {error}"
