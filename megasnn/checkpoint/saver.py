"""The saves of a run: at once, or by a thread from a staged copy; a failed one does not end the run."""

from __future__ import annotations

import datetime
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from megasnn.checkpoint.folder import Retention, remove, superfluous
from megasnn.checkpoint.format import BESIDE, Progress, SavedFile
from megasnn.checkpoint.optimizer_state import LocalState
from megasnn.checkpoint.save import Group, Written, kind_of, save_checkpoint, write_checkpoint, written_here
from megasnn.checkpoint.tensor_io import LocalBox, boxes_of, file_layout, write_image
from megasnn.files.problems import CheckpointError
from megasnn.parallel.agreement import is_first
from megasnn.parallel.sharding import ShardedTensor

# Ranks wait for each other as long as the slowest disk takes. megasnn.engine.faults ends them when one is lost.
_PATIENCE = datetime.timedelta(days=7)


class StagingBuffer:
    """The file of a rank in memory of the CPU, with its tensors as they are at one moment; kept for the next save.

    On a GPU copies to pinned memory are put into the queue at once, in front of what changes the tensors. On a CPU only
    what a forward pass changes (running statistics) is copied at once: weights and the optimizer's state stay as they
    are until the next update, so `rest` may copy them beside the forward and backward passes.
    """

    def __init__(self) -> None:
        self.boxes: list[LocalBox] = []
        self._image = torch.empty(0, dtype=torch.uint8)
        self._memory: list[Tensor] = []  # of each box, in the image
        self._left: list[tuple[Tensor, Tensor]] = []
        self._events: list[torch.cuda.Event] = []

    def take(self, entries: Sequence[ShardedTensor]) -> None:
        """Begins a copy of these tensors."""
        boxes = boxes_of(written_here(entries))
        devices = {entry.tensor.device for _, entry, _ in boxes if entry.tensor.is_cuda}
        if self.boxes != (found := [box for box, _, _ in boxes]):
            self._allocate(found, pinned=bool(devices))
        now = list[tuple[Tensor, Tensor]]()
        self._left = []
        for memory, (box, entry, piece) in zip(self._memory, boxes, strict=True):
            at_once = entry.tensor.is_cuda or not (entry.is_parameter or box.tensor.startswith(BESIDE))
            (now if at_once else self._left).append((memory, piece.of_local(entry.tensor.detach())))
        _copy(now)
        self._events = [torch.cuda.current_stream(device).record_event() for device in devices]

    def _allocate(self, boxes: list[LocalBox], pinned: bool) -> None:
        self.boxes, (header, places) = boxes, file_layout(boxes)
        self._image = torch.empty(places[-1].stop if places else 0, dtype=torch.uint8, pin_memory=pinned)
        self._memory = [
            self._image[place].view(getattr(torch, box.dtype)).view(box.sizes)
            for place, box in zip(places, boxes, strict=True)
        ]
        if boxes:
            self._image.numpy()[: len(header)] = list(header)

    def rest(self) -> None:
        """Copies what `take` has left."""
        _copy(self._left)
        self._left = []

    def write(self, path: Path) -> SavedFile:
        """Writes the copies, once they have come from the GPU. Raises OSError."""
        for event in self._events:
            event.synchronize()
        return write_image(path, self._image.numpy().data)


def _copy(pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
    """Copies tensors by one call, which needs the interpreter's lock once."""
    if pairs:
        torch._foreach_copy_([memory for memory, _ in pairs], [values for _, values in pairs], non_blocking=True)


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
        self._folder, self._retention, self._group = folder, retention or Retention(), process_group
        self._staging = StagingBuffer() if background else None
        if background and process_group is not None:
            self._group = dist.new_group(dist.get_process_group_ranks(process_group), _PATIENCE, backend="gloo")
            dist.barrier(self._group)  # making a group does not wait for its members
        self._watched: torch.optim.Optimizer | None = None
        self._thread: threading.Thread | None = None
        self._copied = threading.Event()
        self.report, self._complete = report, complete
        self.saved, self.failed = saved, False

    def save(self, progress: Progress, state: LocalState, best: bool = False) -> None:
        """Saves, unless this iteration is saved already and has not become the best since.

        In the background, what a forward pass can change is copied before this returns; weights and the optimizer's
        state are copied until `optimizer.step`, which waits for that. Code that changes them in another way calls
        `settle` first. A failure is told and remembered; the next save tries again.
        """
        if self.busy:
            self._tell("the checkpoint before is still being written: waiting for it")
        self.finish()
        if self.saved == progress.iteration and not best:
            return
        if self._staging is None:
            self._attempt(progress.iteration, lambda: save_checkpoint(self._folder, progress, state, self._group, best))
            return
        self._start(self._staging, progress, state, best)

    def _start(self, staging: StagingBuffer, progress: Progress, state: LocalState, best: bool) -> None:
        """Begins a save in the background. What goes wrong with this rank's copies fails the save on all ranks."""
        problem: Exception | None = None
        try:
            staging.take(state.entries())
        except Exception as error:
            problem = error
        optimizer = state.optimizer
        if optimizer is not None and optimizer is not self._watched:
            optimizer.register_step_pre_hook(lambda *_: self.settle())
            self._watched = optimizer

        def copy() -> Exception | None:
            try:
                staging.rest()
            except Exception as error:
                return error
            finally:
                self._copied.set()
            return problem

        def save() -> None:
            wrong = copy()

            def write(path: Path) -> Written | None:
                if wrong is not None:
                    raise wrong
                return Written(path.name, staging.write(path), staging.boxes) if staging.boxes else None

            kind = kind_of(optimizer)
            self._attempt(
                progress.iteration,
                lambda: write_checkpoint(self._folder, progress, kind, write, self._group, best),
            )

        self._copied.clear()
        self._thread = threading.Thread(target=save, name="megasnn-save", daemon=True)
        self._thread.start()

    def settle(self) -> None:
        """Waits until the save in the background has its copies: from here on every tensor may be changed."""
        if self._thread is not None:
            self._copied.wait()

    @property
    def busy(self) -> bool:
        """True while a save is being written in the background."""
        return self._thread is not None and self._thread.is_alive()

    def finish(self, seconds: float | None = None) -> None:
        """Waits for the save in the background, if there is one; no longer than so many seconds."""
        if self._thread is not None:
            self._thread.join(seconds)
        self._thread = None

    def close(self) -> None:
        """Ends what works beside training. What it is writing is lost."""
        if self._staging is not None and self._group is not None and not self.busy:
            dist.destroy_process_group(self._group)
            self._group = self._staging = None  # its threads end with the last who holds it

    def _attempt(self, iteration: int, save: Callable[[], Path]) -> None:
        began = time.monotonic()
        try:
            path = save()
        except Exception as error:
            self.failed = True
            reason = str(error) if isinstance(error, CheckpointError) else f"{type(error).__name__}: {error}"
            self._tell(
                f"WARNING: the checkpoint of iteration {iteration} was NOT SAVED; the run goes on and tries again at "
                f"the next interval. {reason}"
            )
            return
        self.failed, self.saved = False, iteration
        self._tell(f"saved {path} in {time.monotonic() - began:.1f} s")
        if is_first(self._group):
            self._complete(iteration, path)
            self._prune()

    def _prune(self) -> None:
        try:
            for path in remove(superfluous(self._folder, self._retention)):
                self._tell(f"removed {path} (--keep-last {self._retention.last})")
        except OSError as error:
            self._tell(f"WARNING: cannot remove checkpoints that are no longer kept: {error}")

    def _tell(self, text: str) -> None:
        if is_first(self._group):
            self.report(text)
