"""The loop of a run: iterations, exit conditions, signals, evaluation, saving.

After SIGTERM, SIGINT or SIGUSR1 a run saves at the end of its step and ends; a second signal ends it at once.
"""

from __future__ import annotations

import atexit
import os
import signal
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import replace
from types import FrameType, TracebackType

from megasnn.common.checks import error_context
from megasnn.common.memory import memory_scalars
from megasnn.config import PretrainConfig
from megasnn.data import GlobalBatch
from megasnn.engine import Engine
from megasnn.engine.not_finite import first_non_finite
from megasnn.parallel.agreement import gather
from megasnn.parallel.collectives import traffic
from megasnn.parallel.replica_check import ReplicaError, compare_replicas
from megasnn.parallel_state import ParallelState
from megasnn.telemetry.callback import Callback
from megasnn.telemetry.records import RunOutline
from megasnn.telemetry.reporter import Reporter
from megasnn.training.data import RunData
from megasnn.training.memory import announce, compare, forecast_memory
from megasnn.training.metrics import Metrics, Pictures, StepTrace
from megasnn.training.operations import Operations
from megasnn.training.resume import load_start
from megasnn.training.saving import Saves
from megasnn.training.start import agree_on_start
from megasnn.training.startup_log import introduce, log_folder

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
SAME_REQUEST_SECONDS = 1.0
"""A launcher passes on what the terminal has sent to all processes already: that is one request, not two."""


class TrainingRun:
    """One rank's side of a run. Making one builds the model, loads what the run starts from, and introduces it in the
    log; `train` and `close` follow.

    Args:
        stop: signals that ask for the end.
        callbacks: are called with what happens, on the first rank.

    Attributes:
        engine: the model, its optimizer, and the steps.
        saved: False when the last checkpoint that should be there is not.
        has_evaluated: False when the last evaluation was left, since the run was asked to stop in it.
    """

    def __init__(
        self,
        config: PretrainConfig,
        state: ParallelState,
        stop: StopSignals | None = None,
        callbacks: Sequence[Callback] = (),
    ) -> None:
        self.config, self.state, self.stop = config, state, stop or StopSignals()
        self._started, self._in_evaluation = time.monotonic(), False
        self.saved = self.has_evaluated = True
        self._skipped_samples = self._skipped_steps = self._skipped_in_a_row = 0  # steps: since the last save
        start, lock = agree_on_start(config, state)
        with ExitStack() as undo:
            if lock is not None:
                undo.callback(lock.release)
            self.data = data = RunData(config, state)
            self.engine = engine = Engine(config, length=data.length, wants_to_stop=self._wants_to_stop)
            undo.callback(engine.close)
            with error_context("while starting the run"):
                loaded = load_start(config, engine, data, start, lock)
                engine.length = config.training.length(
                    data.length.epoch_samples, engine.iteration, engine.consumed_samples
                )
                engine.step.iterations = engine.length.iterations
                self.iterations = engine.length.iterations
                self.reporter = reporter = Reporter(self._outline(), state.rank == 0, callbacks)
                self.saves = Saves(config, engine, data, reporter, lock, loaded.best, loaded.saved)
                self.metrics = Metrics(engine)
                self.operations = Operations(engine.distributed)
                self.pictures = Pictures(config, engine, data.datasets, self.metrics.rasters, reporter)
                introduce(config, engine, reporter)
                self._memory = [] if config.training.evaluate_only else forecast_memory(config, engine, reporter)
                announce(self._memory, reporter)
                self._introduce_start(loaded.averaged, [*start.notices, *loaded.notices, *data.notices])
            undo.pop_all()

    def _outline(self) -> RunOutline:
        # An evaluation only continues no log, and removes nothing of one.
        position = self.engine.iteration, self.engine.consumed_samples
        resumed = position if 0 < position[0] and self.iterations else None
        folders = self.config.logging.tensorboard_dir, log_folder(self.config)
        return RunOutline(self.iterations, self.data.length.epoch_samples, *folders, resumed)

    def _introduce_start(self, averaged: bool, notices: Sequence[str]) -> None:
        for notice in filter(None, notices):
            self.reporter.line(notice)
        if self.config.training.evaluate_only:
            what = "average of the weights" if averaged else "weights"
            self.reporter.line(f"evaluating the {what} of iteration {self.engine.iteration}")
            return
        iteration, samples = self.engine.iteration, self.engine.consumed_samples
        if iteration >= self.iterations:
            self.reporter.line(
                f"iteration {self.engine.iteration} of {self.iterations} is reached already: evaluating only"
            )
        if iteration:
            self.reporter.line(f"continuing at iteration {iteration}, {samples} samples consumed")

    @property
    def has_diverged(self) -> bool:
        """True when so many steps in a row were skipped that the run ends."""
        return 0 < self.config.training.max_skipped_steps <= self._skipped_in_a_row

    # --- training

    def train(self) -> None:
        """Trains until the last iteration, an exit condition or a signal; evaluates and saves at the end.

        With --evaluate-only, evaluates once.
        """
        with traffic.counting():
            if self.config.training.evaluate_only:
                self.evaluate()
                return
            self._compare_replicas_if(True)
            traffic.reset()  # traffic and time until here belong to no iteration
            self.reporter.begin()
            trace = StepTrace(self.config, self.state, (self.engine.iteration, self.iterations), self.reporter)
            with closing(self.data.loader(self.engine).batches(self.engine.consumed_samples)) as batches:
                while self.engine.iteration < self.iterations:
                    with self.engine.step.timers("data"), error_context("while reading a batch"):
                        batch = next(batches)
                    self._iterate(batch, trace)
                    if self._should_exit():
                        break
            self._end()

    def _end(self) -> None:
        if self.has_diverged:
            self.reporter.line(
                f"WARNING: the last {self._skipped_in_a_row} steps were skipped, since loss or gradient were not "
                f"finite (--max-skipped-steps): the run ends at iteration {self.engine.iteration} and saves nothing"
            )
        elif self.engine.distributed.stop_votes:
            self.reporter.line(f"asked to stop: the run ends at iteration {self.engine.iteration} of {self.iterations}")
        elif self._evaluates:
            self.evaluate()
        if not self.has_diverged:
            self._save_if(True)
        self.saved = self.saves.finish()
        if not self.has_diverged:
            compare(self._memory, self.state, self.reporter)

    def _iterate(self, batch: GlobalBatch, trace: StepTrace) -> None:
        number = self.engine.iteration + 1
        logs = self._logs(number)
        self.metrics.spikes.enabled = logs
        self.pictures.begin(batch, self.engine.iteration)
        with trace.around(number):
            result = self.engine.train_on(batch)
        self.metrics.spikes.enabled = False
        self._skipped_in_a_row = self._skipped_in_a_row + 1 if result.skipped else 0
        self._skipped_steps += result.skipped
        self._skipped_samples += sum(micro.skipped for micro in batch.micro_batches)
        if result.not_finite:
            self.reporter.line(f"iteration {number}: {result.not_finite}")
        self.reporter.step(result)
        if logs:
            self._log()
        self.pictures.end(self.engine.iteration)
        if self.engine.iteration < self.iterations and not self._should_exit():  # else `_end` evaluates and saves
            self._between_steps()

    def _between_steps(self) -> None:
        """Evaluates, compares replicas and saves where that is due."""
        number, logging = self.engine.iteration, self.config.logging
        if self._evaluates and _due(number, logging.eval_interval):
            self.evaluate()
            if self.engine.distributed.stop_votes:
                return
        saves = _due(number, self.config.checkpoint.save_interval) or self.saves.at_best(number)
        self._compare_replicas_if(_due(number, self.config.parallel.check_replicas_interval) and not saves)
        self._save_if(saves)

    def _log(self) -> None:
        measured, layers = self.metrics.since_last(self.engine.iteration)
        predicted = memory_scalars([each.total for each in self._memory], "predicted")
        skipped = self.data.skipped_over_replicas(self.engine, self._skipped_samples, training=True)
        engine = self.engine
        self.reporter.log(engine.iteration, engine.consumed_samples, {**measured, **predicted}, layers, skipped)

    def _logs(self, number: int) -> bool:
        """Returns True where iteration `number` has a log line."""
        ends = number == self.iterations or _due(number, self.config.training.exit_interval)
        return ends or _due(number, self.config.logging.log_interval)

    def _should_exit(self) -> bool:
        at_interval = _due(self.engine.iteration, self.config.training.exit_interval)
        return at_interval or self.engine.distributed.stop_votes > 0 or self.has_diverged

    def _wants_to_stop(self) -> bool:
        """Returns True after a signal to this rank, or when a callback has asked for it; after so many minutes by the
        first rank's clock, since clocks differ, but not within an evaluation: a long one would never be finished."""
        minutes = self.config.training.exit_duration_in_mins
        late = minutes is not None and time.monotonic() - self._started > 60 * minutes
        late = late and self.state.rank == 0 and not self._in_evaluation
        return self.stop.requested is not None or self.reporter.asked_to_stop or late

    # --- evaluation

    @property
    def _evaluates(self) -> bool:
        return self.data.evaluates and self.config.logging.eval_iters != 0

    @error_context("while evaluating")
    def evaluate(self) -> None:
        """Evaluates and logs; an evaluation that is left does not count. Collective."""
        engine, reporter, data = self.engine, self.reporter, self.data
        loader = data.loader(engine, training=False)
        self._in_evaluation = True
        batches = loader.batches(limit=self.config.logging.eval_iters)
        of_training = traffic.counting(False)  # the log has the traffic of training
        with of_training, reporter.pause(), closing(batches):
            with self.operations.counting():
                record = engine.evaluate_on(self._until_asked_to_stop(batches))
            operations = self.operations.of_sample(record.samples)
            skipped = data.skipped_over_replicas(engine, loader.skipped, training=False)
        self._in_evaluation = False
        due = data.samples_to_evaluate
        self.has_evaluated = record.samples + skipped == due
        if not self.has_evaluated:
            reporter.line(
                f"asked to stop: the evaluation at iteration {engine.iteration} was left after {record.samples} of "
                f"{due} samples, and does not count"
            )
            return
        self.saves.found(engine.iteration, record.metrics.get("top1", 0.0))
        reporter.evaluation(replace(record, skipped_samples=skipped), operations)

    def _until_asked_to_stop(self, batches: Iterable[GlobalBatch]) -> Iterator[GlobalBatch]:
        """Ends after the same batch on all ranks: the request travels with what they exchange of each batch."""
        for batch in batches:
            yield batch
            if self.engine.distributed.stop_votes:
                return

    # --- saving

    @error_context("while saving")
    def _save_if(self, due: bool) -> None:
        if not due:
            return
        self._compare_replicas_if(True)
        self._require_finite()
        with self.reporter.pause():
            self.saves.save(self._skipped_steps)
        self._skipped_steps = 0

    def _require_finite(self) -> None:
        """Raises ValueError on every rank where state that is to be saved is not finite on one of them. Collective."""
        if not self.config.checkpoint.save:
            return
        found = first_non_finite((entry.name, entry.tensor) for entry in self.engine.checkpoints.entries())
        where = next(filter(None, gather(self.state.world.handle, found)), None)
        if where is not None:
            self.saves.finish()
            raise ValueError(f"iteration {self.engine.iteration} is not saved, since it is not finite: {where}")

    def _compare_replicas_if(self, due: bool) -> None:
        """Ends the run where replicas differ, once the checkpoint that is being written is complete: it is good."""
        has_replicas = self.state.world.size > self.state.pp.size
        if not (due and self.config.parallel.check_replicas_interval and has_replicas):
            return
        try:
            with self.engine.step.timers("compare_replicas"):
                compare_replicas(self.engine.checkpoints.entries(), self.state, self.engine.iteration)
        except ReplicaError:
            self.saves.finish()
            raise

    def close(self) -> None:
        self.saves.close()
        self.reporter.close()
        self.engine.close()


def _due(iteration: int, interval: int | None) -> bool:
    return interval is not None and interval > 0 and iteration % interval == 0


class StopSignals:
    """Context manager: within it the signals ask the run to stop; `requested` names the first one that came.

    Only the main thread of a program can handle signals; anywhere else nothing is ever requested.
    """

    def __init__(self) -> None:
        self.requested: str | None = None
        self._requested_at = 0.0
        self._handlers = ExitStack()

    @property
    def status(self) -> int:
        """The exit status of this rank where the request leaves nothing that counts."""
        return 1 if self.requested is None else 128 + signal.Signals[self.requested]

    def __enter__(self) -> StopSignals:
        if threading.current_thread() is threading.main_thread():
            for number in SIGNALS:
                if signal.getsignal(number) is not signal.SIG_IGN:  # as nohup has it
                    self._handlers.callback(signal.signal, number, signal.signal(number, self._take))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._handlers.close()
        if threading.current_thread() is threading.main_thread():
            atexit.register(_ignore_signals)

    def _take(self, number: int, frame: FrameType | None) -> None:
        name = signal.Signals(number).name
        if self.requested is None:
            self.requested, self._requested_at = name, time.monotonic()
            # torchrun sends SIGTERM when another rank has failed: then nothing can be saved, and nothing is promised.
            if number != signal.SIGTERM and os.environ.get("LOCAL_RANK", "0") == "0":
                text = f"{name}: the run ends after this step or evaluated batch; once more ends it at once\n"
                sys.stderr.write(text)
        elif time.monotonic() - self._requested_at > SAME_REQUEST_SECONDS:
            sys.stderr.write(f"{name} after {self.requested}: ending at once; what was saved before stays\n")
            os._exit(128 + number)


def _ignore_signals() -> None:
    """The run is over, and only the interpreter still ends: its exit status stands."""
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)
