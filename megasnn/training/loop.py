"""A run's loop: iterations, exit conditions, evaluation, saving."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import replace

from megasnn.checkpoint.folder import ChosenCheckpoint
from megasnn.common.checks import error_context
from megasnn.common.files import quantity
from megasnn.common.memory import memory_scalars
from megasnn.config import PretrainConfig
from megasnn.config.data import NO_DATASETS, GivenDatasets
from megasnn.data import RankBatch
from megasnn.engine import Engine
from megasnn.engine.not_finite import first_not_finite
from megasnn.parallel.agreement import gather
from megasnn.parallel.replica_check import ReplicaError, compare_replicas
from megasnn.parallel.traffic import traffic
from megasnn.parallel_state import ParallelState
from megasnn.telemetry.callback import Callback
from megasnn.telemetry.records import RunOutline
from megasnn.telemetry.reporter import Reporter
from megasnn.training.data import RunData
from megasnn.training.loading import load_start
from megasnn.training.memory import forecast_memory, log_forecast, log_measured_peak
from megasnn.training.metrics import Metrics, Pictures, StepTrace
from megasnn.training.micro_batch import find_micro_batch
from megasnn.training.operations import Operations
from megasnn.training.saving import Saves, how_to_go_on
from megasnn.training.signals import StopSignals
from megasnn.training.start import agree_on_start
from megasnn.training.startup_log import introduce, log_folder


class TrainingRun:
    """One rank's side of a run.

    The constructor builds the model, loads the start, and introduces the run in the log. Then call `train`, then
    `close`. All are collective.

    Args:
        stop: signals that ask the run to end.
        checkpoint: as for `agree_on_start`.
        given: data sets in Python, in place of the shards of the flags.

    Attributes:
        saves_succeeded: False when the last checkpoint could not be written.
        has_evaluated: False when a stop request interrupted the last evaluation.
    """

    def __init__(
        self,
        config: PretrainConfig,
        state: ParallelState,
        stop: StopSignals | None = None,
        callbacks: Sequence[Callback] = (),
        checkpoint: ChosenCheckpoint | None = None,
        given: GivenDatasets = NO_DATASETS,
    ) -> None:
        self.config = config
        self.state = state
        self.stop = stop or StopSignals()
        self._started = time.monotonic()
        self._in_evaluation = False
        self.saves_succeeded = True
        self.has_evaluated = True
        self._skipped_samples = 0
        self._skipped_steps = 0  # since the last save
        self._skipped_in_a_row = 0
        # First of all: a run that is refused its folder or checkpoint has built nothing.
        start, lock = agree_on_start(config, state, checkpoint)
        with ExitStack() as undo:
            if lock is not None:
                undo.callback(lock.release)
            config, size_notice = find_micro_batch(config, state, start.checkpoint)
            self.config = config
            # Before the Engine: the number of samples is needed for epochs, and these for the learning rates.
            self.data = data = RunData(config, state, given)
            self.engine = engine = Engine(config, length=data.length, wants_to_stop=self._wants_to_stop)
            undo.callback(engine.close)
            with error_context("while starting the run"):
                loaded = load_start(config, engine, data, start, lock)
                # A run by epochs counts its remaining steps from the samples consumed so far, known only after loading.
                epoch = data.length.epoch_samples
                engine.set_length(config.training.length(epoch, engine.iteration, engine.consumed_samples))
                self.iterations = engine.length.iterations
                self._first = engine.iteration + 1
                self.reporter = reporter = Reporter(self._outline(), state.rank == 0, callbacks)
                self.saves = Saves(config, engine, data, reporter, lock, loaded.best, loaded.is_saved)
                self.metrics = Metrics(engine)
                self.operations = Operations(engine.distributed)
                self.pictures = Pictures(config, engine, data.datasets, self.metrics.rasters, reporter)
                introduce(config, engine, reporter)
                self._memory = [] if config.training.evaluate_only else forecast_memory(config, engine, reporter)
                log_forecast(self._memory, reporter)
                self._introduce_start(loaded.averaged, [size_notice, *start.notices, *loaded.notices, *data.notices])
            undo.pop_all()

    def _outline(self) -> RunOutline:
        iteration = self.engine.iteration
        continued = None
        # An evaluation alone has no iterations: it neither continues the log of a training nor removes lines of it.
        if iteration and self.iterations:
            continued = iteration, self.engine.consumed_samples
        return RunOutline(
            self.iterations,
            self.data.length.epoch_samples,
            self.config.logging.tensorboard_dir,
            log_folder(self.config),
            continued,
            self.data.datasets.train_units,
            self.data.datasets.valid_units,
        )

    def _introduce_start(self, averaged: bool, notices: Sequence[str]) -> None:
        for notice in filter(None, notices):
            self.reporter.line(notice)
        iteration = self.engine.iteration
        if self.config.training.evaluate_only:
            weights = "average of the weights" if averaged else "weights"
            self.reporter.line(f"evaluating the {weights} of iteration {iteration}")
            return
        if iteration >= self.iterations:
            self.reporter.line(f"iteration {iteration} of {self.iterations} is reached already: evaluating only")
        if iteration:
            consumed = quantity(self.engine.consumed_samples, "sample")
            self.reporter.line(f"continuing at iteration {iteration}, {consumed} consumed")

    @property
    def has_diverged(self) -> bool:
        """Whether the last --max-skipped-steps steps were all skipped, which ends the run."""
        return 0 < self.config.training.max_skipped_steps <= self._skipped_in_a_row

    def train(self) -> None:
        """Trains until the last iteration, an exit condition or a signal; evaluates and saves at the end.

        With --evaluate-only, evaluates once.
        """
        with traffic.counting():
            if self.config.training.evaluate_only:
                self.evaluate()
                return
            # Replicas that start with other weights would stay different: only gradients are summed.
            self._compare_replicas()
            # Traffic before the first step belongs to no iteration.
            traffic.reset()
            self.reporter.begin()
            trace = StepTrace(self.config, self.state, self.reporter, self.engine.iteration, self.iterations)
            with closing(self.data.loader(self.engine).batches(self.engine.consumed_samples)) as batches:
                while self.engine.iteration < self.iterations:
                    with self.engine.trainer.timers("data"), error_context("while reading a batch"):
                        batch = next(batches)
                    self._iterate(batch, trace)
                    if self._should_exit():
                        break
            self._end()

    def _iterate(self, batch: RankBatch, trace: StepTrace) -> None:
        """Takes and logs one step; evaluates, compares replicas and saves if due."""
        number = self.engine.iteration + 1
        is_last = number == self.iterations or _due(number, self.config.training.exit_interval)
        logs = is_last or _due(number, self.config.logging.log_interval)
        # Counting spikes costs time in every layer, so only logged steps count them.
        self.metrics.spikes.enabled = logs
        self.pictures.begin(batch, self.engine.iteration)
        with trace.around(number):
            result = self.engine.train_on(batch)
        self.metrics.spikes.enabled = False
        # One skipped step may be a bad batch. Many in a row mean weights that no batch repairs.
        self._skipped_in_a_row = self._skipped_in_a_row + 1 if result.skipped else 0
        self._skipped_steps += result.skipped
        self._skipped_samples += sum(micro.skipped for micro in batch.micro_batches)
        if result.not_finite:
            self.reporter.line(f"iteration {number}: {result.not_finite}")
        self.reporter.step(result)
        if logs:
            self._log()
        elif number == self._first:
            interval = self.config.logging.log_interval
            self.reporter.first_step(result, interval, time.monotonic() - self._started)
        self.pictures.end(self.engine.iteration)
        if self.engine.iteration < self.iterations and not self._should_exit():  # else `_end` evaluates and saves
            self._evaluate_and_save()

    def _log(self) -> None:
        engine = self.engine
        measured, layers = self.metrics.since_last(engine.iteration)
        predicted = memory_scalars([each.total for each in self._memory], "predicted")
        skipped = self.data.skipped_over_replicas(engine, self._skipped_samples, training=True)
        self.reporter.log(engine.iteration, engine.consumed_samples, {**measured, **predicted}, layers, skipped)

    def _evaluate_and_save(self) -> None:
        """Evaluates, saves and compares replicas, each if due after this step."""
        number = self.engine.iteration
        if self._evaluates and _due(number, self.config.logging.eval_interval):
            self.evaluate()
            # The end of the run saves this iteration.
            if self.engine.distributed.stop_votes:
                return
        if _due(number, self.config.checkpoint.save_interval) or self.saves.is_best(number):
            # A save compares replicas as well.
            self._save()
        elif _due(number, self.config.parallel.check_replicas_interval):
            self._compare_replicas()

    def _end(self) -> None:
        """Evaluates, saves, and reports why the run ends."""
        if self.has_diverged:
            self.reporter.line(
                f"WARNING: {quantity(self._skipped_in_a_row, 'step')} in a row skipped, since loss or gradient were "
                f"not finite (--max-skipped-steps): the run ends at iteration {self.engine.iteration} and saves nothing"
            )
        elif self.engine.distributed.stop_votes:
            self.reporter.line(f"asked to stop: the run ends at iteration {self.engine.iteration} of {self.iterations}")
        elif self._evaluates:
            self.evaluate()
        # After divergence the last checkpoint before it must stay the latest.
        if not self.has_diverged:
            self._save()
        self.saves_succeeded = self.saves.finish()
        if not self.has_diverged:
            log_measured_peak(self._memory, self.state, self.reporter)
            if self.engine.iteration < self.iterations:
                self.reporter.line(how_to_go_on(self.config.checkpoint, self.saves_succeeded))

    def _should_exit(self) -> bool:
        at_interval = _due(self.engine.iteration, self.config.training.exit_interval)
        return at_interval or self.engine.distributed.stop_votes > 0 or self.has_diverged

    def _wants_to_stop(self) -> bool:
        """After a signal, a callback's request, or --exit-duration-in-mins."""
        minutes = self.config.training.exit_duration_in_mins
        late = minutes is not None and time.monotonic() - self._started > 60 * minutes
        # The first rank's time counts, since clocks differ. A long evaluation would never finish, so time does
        # not end it.
        late = late and self.state.rank == 0 and not self._in_evaluation
        return self.stop.requested is not None or self.reporter.asked_to_stop or late

    @property
    def _evaluates(self) -> bool:
        return self.data.evaluates and self.config.logging.eval_iters != 0

    @error_context("while evaluating")
    def evaluate(self) -> None:
        """Evaluates and logs. An interrupted evaluation does not count. Collective."""
        engine = self.engine
        data = self.data
        loader = data.loader(engine, training=False)
        batches = loader.batches(limit=self.config.logging.eval_iters)
        self._in_evaluation = True
        # The log shows the traffic of training only.
        with traffic.counting(False), self.reporter.pause(), closing(batches):
            with self.operations.counting():
                record = engine.evaluate_on(self._until_asked_to_stop(batches))
            operations = self.operations.mean_per_sample(record.samples)
            skipped = data.skipped_over_replicas(engine, loader.skipped, training=False)
        self._in_evaluation = False
        due = data.samples_to_evaluate
        # An accuracy over fewer samples must not become the best.
        self.has_evaluated = record.samples + skipped == due
        if not self.has_evaluated:
            self.reporter.line(
                f"asked to stop: the evaluation at iteration {engine.iteration} was left after {record.samples} of "
                f"{quantity(due, 'sample')}, and does not count"
            )
            return
        self.saves.consider(engine.iteration, record.metrics.get("top1", 0.0))
        self.reporter.evaluation(replace(record, skipped_samples=skipped), operations)

    def _until_asked_to_stop(self, batches: Iterable[RankBatch]) -> Iterator[RankBatch]:
        for batch in batches:
            # A request travels with a batch's sums, so all ranks see it after the same batch.
            yield batch
            if self.engine.distributed.stop_votes:
                return

    @error_context("while saving")
    def _save(self) -> None:
        self._compare_replicas()
        self._require_finite()
        with self.reporter.pause():
            self.saves.save(self._skipped_steps)
        self._skipped_steps = 0

    def _require_finite(self) -> None:
        """Raises ValueError on every rank if any rank would save a tensor that is not finite. Collective."""
        if not self.config.checkpoint.save:
            return
        found = first_not_finite((entry.name, entry.tensor) for entry in self.engine.checkpoints.whole_entries())
        where = next(filter(None, gather(self.state.world.handle, found)), None)
        if where is not None:
            # A save in the background has copied the finite state before.
            self.saves.finish()
            raise ValueError(f"iteration {self.engine.iteration} is not saved, since it is not finite: {where}")

    def _compare_replicas(self) -> None:
        # Tensor-parallel ranks share tensors too, such as the optimizer's step counts.
        has_replicas = self.state.world.size > self.state.pp.size
        if not (self.config.parallel.check_replicas_interval and has_replicas):
            return
        try:
            with self.engine.trainer.timers("compare_replicas"):
                compare_replicas(self.engine.checkpoints.whole_entries(), self.state, self.engine.iteration)
        except ReplicaError:
            # A save in the background began before the replicas differed.
            self.saves.finish()
            raise

    def close(self) -> None:
        self.saves.close()
        self.reporter.close()
        self.engine.close()


def _due(iteration: int, interval: int | None) -> bool:
    return interval is not None and interval > 0 and iteration % interval == 0
