"""From micro-batches on: a step up to the new weights, evaluation and prediction with their average."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from types import FrameType

import torch
from torch import Tensor

from megasnn import device_checks
from megasnn.batching import micro_batches_of
from megasnn.bundle import Bundle, logits_of
from megasnn.config import PretrainConfig
from megasnn.config.training import Length
from megasnn.data import GlobalBatch
from megasnn.engine.distributed_model import DistributedModel
from megasnn.engine.faults import claim_fault
from megasnn.engine.not_finite import first_place
from megasnn.engine.setup import window_count
from megasnn.engine.without_gradient import names_without_gradient
from megasnn.grid import HOLDING_AXES
from megasnn.optim import WeightAverage, build_optimizer, learning_rate, takes_found_inf
from megasnn.parallel_state import abandon_model_parallel
from megasnn.pipeline.step_state import MicroBatchInput
from megasnn.telemetry.records import EvaluationRecord, StepResult
from megasnn.telemetry.timers import Timers

_OVERFLOW = "values too large for their type, in statistics of a norm or in squares of gradients; the step is skipped"


class Steps:
    """Steps, evaluations and predictions of a model, on this rank of a layout.

    Args:
        length: of the training, for the course of the learning rate.

    Attributes:
        distributed: the model's chunks on this rank.
        optimizer: of the parameters that this rank owns. average: of what it owns; None without `ema_decay`.
        timers: of the phases of a step.
        iteration, consumed_samples: optimizer steps done, and training samples used.
        without_gradient: names of the trained parameters that the first step on this object gave no gradient; None
            before that.
    """

    def __init__(self, config: PretrainConfig, distributed: DistributedModel, length: Length) -> None:
        self._config, self._length, self._state = config, length, distributed.state
        self.distributed = distributed
        groups = {axis: self._state.group(axis) for axis in HOLDING_AXES}
        self.optimizer = build_optimizer(distributed.owned, config.optimizer, groups)
        decay = config.optimizer.ema_decay
        self.average = WeightAverage(distributed.owned, decay) if decay else None
        self.timers = Timers(self._state.device)
        self.iteration = self.consumed_samples = 0
        self.without_gradient: list[str] | None = None
        self._masks = takes_found_inf(self.optimizer, config.optimizer)
        self._failure: str | None = None

    # --- training

    def train(self, micro_batches: Sequence[MicroBatchInput], batch: GlobalBatch) -> StepResult:
        """An optimizer step on this replica's micro-batches of a global batch.

        Where the optimizer can, a device updates the weights before the host has read what the step came to: it need
        not wait for the host's orders then. By its own reading it leaves them as they are where the step must change
        nothing.
        """
        distributed, samples = self.distributed, batch.size
        with self._guarded():
            with self.timers("forward_backward"):
                sums = distributed.start_step(micro_batches, samples)
            if self.without_gradient is None:
                self.without_gradient = names_without_gradient(distributed)
            with self.timers("optimizer"):
                updates_unread = self._masks and device_checks.runs_ahead(self._state.device)
                if updates_unread:
                    self._change_weights(sums.squares.sqrt(), sums.is_void)
                loss = distributed.finish_step(sums)
                norm, rate, finite = self.update(samples, has_changed_weights=updates_unread)
            where = None if finite else first_place(distributed, micro_batches) or _OVERFLOW
            self.iteration += 1
            self.consumed_samples = batch.consumed_samples
            return StepResult(loss, distributed.correct, samples, norm, rate, not finite, where)

    def update(self, samples: int, has_changed_weights: bool = False) -> tuple[float, float, bool]:
        """After forward and backward of so many samples: running statistics, clipping, weights, average of weights.

        Args:
            has_changed_weights: whether clipping and the optimizer's step are done already.
        Returns:
            the gradient's norm before clipping, the learning rate, and whether all that training keeps is finite. Where
            it is not, everything stays as it was: weights, optimizer state and running statistics.
        """
        distributed = self.distributed
        norm, finite = distributed.norm, distributed.is_finite
        if finite:
            distributed.merge_statistics(self._most_micro_batches(samples))
            if not has_changed_weights:
                self._change_weights(norm)
            distributed.all_gather_params()
            distributed.refresh_copies()
            if self.average is not None:
                self.average.update()
        return norm, self._learning_rate(), finite

    def _change_weights(self, norm: float | Tensor, is_void: Tensor | None = None) -> None:
        """Clips, and steps.

        Args:
            norm: the gradient's. is_void: on the device, whether everything is to stay as it is; None where the host
                knows that it is not.
        """
        self.distributed.gradient_norm.clip(norm, self._config.optimizer.clip_grad, is_void)
        rate = self._learning_rate()
        for group in self.optimizer.param_groups:
            group["lr"] = rate * group["lr_scale"]
        if self._masks:
            self.optimizer.found_inf = None if is_void is None else is_void.float()  # type: ignore[attr-defined]
        self.optimizer.step()

    def _learning_rate(self) -> float:
        return learning_rate(self._config.optimizer, self.iteration, self._length.iterations, self._length.epoch)

    def _most_micro_batches(self, samples: int) -> int:
        count = -(-samples // self._config.training.micro_batch_size)
        return window_count(self._config) * len(micro_batches_of(count, self._state.data.size, 0))

    # --- evaluation

    def evaluate(self, batches: Iterable[Sequence[MicroBatchInput]]) -> EvaluationRecord:
        """Loss and accuracies over this replica's micro-batches of global batches, of the averaged weights where there
        are some. Raises ValueError on every rank when there are no samples."""
        totals = [0.0, 0.0, 0.0, 0.0]
        with self._averaged_weights():
            for micro_batches in batches:
                with self._guarded():
                    parts = self.distributed.evaluate(micro_batches)
                totals = [a + b for a, b in zip(totals, parts, strict=True)]
            with self._guarded():
                loss, samples, top1, top5 = self.distributed.total(totals)
        if not samples:
            raise ValueError("there are no samples to evaluate")
        return EvaluationRecord(
            self.iteration, self.consumed_samples, int(samples), loss / samples, top1 / samples, top5 / samples
        )

    def predict(self, batches: Iterable[Sequence[MicroBatchInput]], samples: int) -> Tensor:
        """Logits `[samples, classes]`, the mean over time, on the device of every rank.

        Args:
            batches: this replica's micro-batches; their labels are the samples' places in what is returned.
        """
        shape, dtype = (samples, self._config.model.num_classes), self.distributed.context.dtype
        logits = torch.zeros(shape, dtype=dtype, device=self._state.device)

        def keep(output: Bundle, places: Tensor) -> None:
            logits[places] = logits_of(output).to(logits.dtype).mean(0)

        with self._guarded():
            with self._averaged_weights():
                for micro_batches in batches:
                    self.distributed.predict(micro_batches, keep)
            return self.distributed.of_all_replicas(logits)

    @contextmanager
    def _averaged_weights(self) -> Iterator[None]:
        """Inside, the model has the average of its weights, where one is kept."""
        if self.average is None:
            yield
            return
        model = self.distributed
        in_part = [whole for whole, mine in zip(model.tensors, model.owned, strict=True) if whole is not mine]
        taken = [entry.tensor for entry in (*in_part, *model.copies)]  # from other ranks
        kept = [tensor.detach().clone() for tensor in taken]
        average = self.average

        def take_back() -> None:  # of no other rank's values: where one has failed, nobody waits for it
            with self._guarded(), torch.no_grad():
                average.exchange()
                for tensor, value in zip(taken, kept, strict=True):
                    tensor.copy_(value)

        with self._guarded():
            average.exchange()
        try:
            model.all_gather_params()
            model.refresh_copies()
            yield
        except BaseException:
            with suppress(Exception):  # a GPU that has failed; the first error is the one to be told
                take_back()
            raise
        take_back()

    # --- what was loaded, and what went wrong

    def loaded(self, place: tuple[int, int] | None = None, averaged: bool = False) -> None:
        """After other values were loaded into the tensors: their copies and the average follow. Collective.

        Args:
            place: (iteration, consumed samples) to go on from; None: these stay.
            averaged: whether the average was loaded with them; otherwise it begins again.
        """
        self.distributed.refresh_copies()
        if self.average is not None and not averaged:
            self.average.restart()
        if place is not None:
            self.iteration, self.consumed_samples = place

    @contextmanager
    def _guarded(self) -> Iterator[None]:
        """Around what ranks do together: an error in it ends the Engine, since the ranks are no longer at the same
        place. Ctrl-C waits until it is done."""
        with interrupts_wait():
            try:
                yield
            except BaseException as error:
                if self._failure is None:
                    kind, (text, *_) = type(error).__name__, (*str(error).splitlines(), "")
                    self._failure = f"{kind}: {text}" if text else kind
                    if self._state.world.size > 1:
                        claim_fault(error)  # the other ranks end: nobody comes to what they wait for
                        abandon_model_parallel()
                raise

    def require_sound(self) -> None:
        """Raises RuntimeError when an error has ended what the ranks did together."""
        if self._failure is not None:
            another = "make another one" + ", in another process" * (self._state.world.size > 1)
            raise RuntimeError(f"this Engine has ended with an error ({self._failure}): {another}")


@contextmanager
def interrupts_wait() -> Iterator[None]:
    """Holds Ctrl-C back: inside, a KeyboardInterrupt is raised at the end. The second one is raised at once.

    A handler of the user's own stays as it is.
    """
    default = signal.default_int_handler
    if threading.current_thread() is not threading.main_thread() or signal.getsignal(signal.SIGINT) is not default:
        yield
        return
    came: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        if came:
            default(number, frame)
        came.append(number)

    signal.signal(signal.SIGINT, note)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, default)
    if came:
        raise KeyboardInterrupt
