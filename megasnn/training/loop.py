"""The loop of a run: iterations, exit conditions, evaluation, log."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager

from megasnn.config import PretrainConfig
from megasnn.data import GlobalBatch
from megasnn.engine import Engine
from megasnn.engine.faults import placed
from megasnn.engine.setup import parameter_names
from megasnn.engine.without_gradient import notice_of
from megasnn.grid import HOLDING_AXES
from megasnn.models.building import describe
from megasnn.non_finite import first_non_finite
from megasnn.optim import require_matches
from megasnn.parallel.agreement import gather, run_on_all_ranks
from megasnn.parallel.replica_check import ReplicaCheck, ReplicaError
from megasnn.parallel.traffic import statistics
from megasnn.parallel_state import ParallelState
from megasnn.telemetry.callback import Callback
from megasnn.telemetry.memory import memory_scalars
from megasnn.telemetry.reporter import Reporter, RunOutline
from megasnn.training.data import RunData
from megasnn.training.evaluation import Evaluations
from megasnn.training.hosts import host_notice
from megasnn.training.introduction import introduce, log_folder
from megasnn.training.memory import MemoryForecast, announce, compare, forecast_memory
from megasnn.training.pictures import Pictures
from megasnn.training.profile import PipelineProfiler, report
from megasnn.training.saving import Saves
from megasnn.training.signals import StopSignals
from megasnn.training.starting import Start, claim, refuse_other_model
from megasnn.training.trace import StepTrace
from megasnn.training.watch import Watch


class TrainingRun:
    """One rank's side of a run. Making one builds the model, loads what the run starts from, and introduces it in the
    log; `train` and `close` follow.

    Args:
        stop: signals that ask for the end.
        callbacks: are told what happens, on the first rank.

    Attributes:
        engine: the model, its optimizer, and the steps.
        saved: False when the last checkpoint that should be there is not.
        evaluations: what becomes of them.
    """

    def __init__(
        self,
        config: PretrainConfig,
        state: ParallelState,
        stop: StopSignals | None = None,
        callbacks: Sequence[Callback] = (),
    ) -> None:
        self.config, self.state, self.stop = config, state, stop or StopSignals()
        self._started = time.monotonic()
        self._skipped_samples, self._prepared, self.saved = 0, False, True
        self._skipped_steps = 0  # since the last save
        self._skipped_in_a_row = 0
        refuse_other_model(config, state)
        require_matches(config.optimizer, parameter_names(describe(config.model, config.neuron.spec)))
        self.data = RunData(config, state)
        self.iterations = self.data.length.iterations
        self.engine = Engine(config, length=self.data.length, wants_to_stop=self._wants_to_stop)
        distributed, plan = self.engine.distributed, self.engine.plan
        self.watch = Watch(distributed, state, self.engine.steps.timers)
        self.profiler = PipelineProfiler(distributed, plan, state) if config.logging.profile_pipeline else None
        self.pictures = Pictures(config.logging, distributed.model, self.data.datasets, state, self.watch.rasters)
        self.replicas = ReplicaCheck(
            self.engine.checkpoints.entries,
            {axis: state.group(axis) for axis in HOLDING_AXES},
            state.world,
            state.communicators.wire,
        )
        with ExitStack() as undo, placed("while starting the run"):
            undo.callback(self.engine.close)
            claimed = claim(config, state)
            if claimed is not None:
                undo.callback(claimed.release)
            begin = Start(config, self.engine, self.data.place).load(claimed is not None and claimed.resumes)
            self.reporter = Reporter(self._outline(), state.rank == 0, callbacks)
            tell, complete = self.reporter.line, self.reporter.saved
            self.saves = Saves(config, self.engine, claimed, self.data.place, begin, tell, complete)
            self.evaluations = Evaluations(
                config, self.engine, self.data, self.saves, self.reporter, begin.owes_evaluation
            )
            notices = [host_notice(state), claimed.notice if claimed is not None else "", begin.notice]
            self._memory = self._introduce(notices)
            undo.pop_all()

    def _outline(self) -> RunOutline:
        # What only evaluates continues no log, and removes nothing of one.
        resumed = (self.iteration, self.consumed_samples) if 0 < self.iteration and self.iterations else None
        logging = self.config.logging
        return RunOutline(
            self.iterations,
            self.data.length.epoch_samples,
            logging.tensorboard_dir,
            log_folder(self.config),
            resumed,
        )

    def _introduce(self, notices: Sequence[str]) -> list[MemoryForecast]:
        """Tells what is about to happen; returns the memory that every rank will need, where it is predicted."""
        config, engine, state, length = self.config, self.engine, self.state, self.data.length
        introduce(
            config, engine.distributed, engine.plan, state, length, length.epoch_samples, self.reporter, self.iteration
        )
        memory: list[MemoryForecast] = []
        if not config.training.evaluate_only:
            optimizer = engine.steps.optimizer
            memory = forecast_memory(config, engine.distributed, optimizer, engine.plan, state, self.reporter)
        announce(memory, self.reporter)
        if notice := "\n".join(filter(None, notices)):
            self.reporter.line(notice)
        if config.training.evaluate_only:
            what = "weights" if engine.steps.average is None else "average of the weights"
            self.reporter.line(f"evaluating the {what} of iteration {self.iteration}")
            return memory
        if self.iteration >= self.iterations:
            self.reporter.line(f"iteration {self.iteration} of {self.iterations} is reached already: evaluating only")
        if self.iteration:
            self.reporter.line(f"continuing at iteration {self.iteration}, {self.consumed_samples} samples consumed")
        return memory

    @property
    def iteration(self) -> int:
        """Optimizer steps done, over all runs that this one continues."""
        return self.engine.iteration

    @property
    def has_diverged(self) -> bool:
        """True when so many steps in a row were skipped that the run ends."""
        most = self.config.training.max_skipped_steps
        return 0 < most <= self._skipped_in_a_row

    @property
    def consumed_samples(self) -> int:
        """Training samples used; the place in the data."""
        return self.engine.consumed_samples

    def train(self) -> None:
        """Until the last iteration, until one of the exit conditions, or until a signal; saves at the end.

        With --evaluate-only, one evaluation.
        """
        with self.stop, statistics.counting():
            if self.config.training.evaluate_only:
                self.evaluations.run()
                return
            self._compare_replicas_if(True)
            # What was sent and how long it took until here is no part of any iteration.
            statistics.reset()
            self.reporter.begin()
            if self.evaluations.owed and self.iteration < self.iterations:
                self.evaluations.run()
                self._save_if(self.saves.at_best(self.iteration))
            trace = StepTrace(self.config, self.state, self.iterations, self.iteration, self.reporter.line)
            with closing(self.data.loader(self.engine).batches(self.consumed_samples)) as batches:
                while self.iteration < self.iterations and not self.engine.stop_votes:
                    with self.watch.timers("data"), placed("while reading a batch"):
                        batch = next(batches)
                    self._iterate(batch, trace)
                    if self._should_exit():
                        break
            trace.close(self.iteration)
            if self.has_diverged:
                self.reporter.line(
                    f"WARNING: the last {self._skipped_in_a_row} steps were skipped, since loss or gradient were not "
                    f"finite (--max-skipped-steps): the run ends at iteration {self.iteration}, and saves nothing more"
                )
                self.saved = self.saves.finish()
                return
            if self.engine.stop_votes:
                self.reporter.line(f"asked to stop: the run ends at iteration {self.iteration} of {self.iterations}")
            else:
                self.evaluations.at_the_end()
            self._save_if(True)
            self.saved = self.saves.finish()
            compare(self._memory, self.state, self.reporter)

    def _iterate(self, batch: GlobalBatch, trace: StepTrace) -> None:
        options = self.config.checkpoint
        number = self.iteration + 1
        logs = self._logs(number)
        self.watch.spikes.enabled = logs
        self.pictures.begin(batch, self.iteration, self.reporter)
        with self._profiled(number, batch), trace.around(number):
            result = self.engine.train_on(batch)
        self.watch.spikes.enabled = False
        self._skipped_in_a_row = self._skipped_in_a_row + 1 if result.skipped else 0
        self._skipped_samples += sum(len(micro.skipped) for micro in batch.micro_batches)
        if not self._prepared:
            if self.engine.steps.without_gradient:
                self.reporter.line(notice_of(self.engine.steps.without_gradient))
            self._require_state_as_needed()
            self._prepared = True
        self._skipped_steps += result.skipped
        if result.not_finite:
            self.reporter.line(f"iteration {number}: {result.not_finite}")
        self.reporter.step(result)
        if logs:
            measured = self.watch.since_last(self.iteration)
            predicted = memory_scalars([each.total for each in self._memory], "predicted")
            skipped = self.data.skipped_over_replicas(self.engine, self._skipped_samples, training=True)
            scalars = {**measured.scalars, **predicted}
            self.reporter.log(self.iteration, self.consumed_samples, scalars, measured.layers, skipped)
            self.pictures.add(self.iteration, measured.layers)
        self.pictures.end(self.iteration, self.reporter, last=self.iteration == self.iterations)
        self.evaluations.begin(self.iteration)
        if self.engine.stop_votes:
            return
        last = self.iteration == self.iterations or self._should_exit()  # `train` evaluates and saves then
        if self.evaluations.owed and not last:
            self.evaluations.run()
            if self.engine.stop_votes:
                return
        saves = (_due(self.iteration, options.save_interval) or self.saves.at_best(self.iteration)) and not last
        self._compare_replicas_if(
            _due(self.iteration, self.config.parallel.check_replicas_interval) and not (saves or last)
        )
        self._save_if(saves)

    def _require_state_as_needed(self) -> None:
        """Raises CheckpointError on every rank, after the first step and not with the first save, where the state of an
        optimizer of the user's own cannot be saved or compared."""
        compares = self.config.parallel.check_replicas_interval and self.replicas.compares
        flags = ["--save"] * bool(self.config.checkpoint.save) + ["--check-replicas-interval"] * bool(compares)
        if flags:
            entries = self.engine.checkpoints.entries
            title = f"{' and '.join(flags)} cannot have this optimizer's state; take another one, or do without:"
            run_on_all_ranks(self.state.world.handle, entries, title)

    def _logs(self, number: int) -> bool:
        """Whether iteration `number` has a log line."""
        ends = number == self.iterations or _due(number, self.config.training.exit_interval)
        return ends or _due(number, self.config.logging.log_interval)

    @contextmanager
    def _profiled(self, number: int, batch: GlobalBatch) -> Iterator[None]:
        """Around iteration `number`: a profile, where one is due. That is the step before a log line, if it can be:
        the one with a log line takes longer, because it counts spikes."""
        early = min(self.iterations, self.config.logging.log_interval) > 1
        if self.profiler is None or not self._logs(number + early):
            yield
            return
        with self.profiler.recording():
            yield
        with self.reporter.pause():
            profile = self.profiler.profile(self.engine.windows * len(batch.micro_batches))
            report(profile, self.reporter, number, batch.consumed_samples)

    def _should_exit(self) -> bool:
        exits = _due(self.iteration, self.config.training.exit_interval) or self.engine.stop_votes > 0
        return exits or self.has_diverged

    def _wants_to_stop(self) -> bool:
        """After a signal to this rank, or when a callback has asked for it; after so many minutes by the first rank's
        clock, since clocks differ, but not within an evaluation: one that takes as long would never be finished."""
        minutes = self.config.training.exit_duration_in_mins
        late = minutes is not None and time.monotonic() - self._started > 60 * minutes
        late = late and self.state.rank == 0 and not self.evaluations.running
        return self.stop.requested is not None or self.reporter.asked_to_stop or late

    @placed("while saving")
    def _save_if(self, due: bool) -> None:
        if not due:
            return
        self._compare_replicas_if(True)
        self._require_finite()
        with self.reporter.pause():
            self.saves.save(self.iteration, self.consumed_samples, self._skipped_steps, self.evaluations.owed)
        self._skipped_steps = 0

    def _require_finite(self) -> None:
        """Raises ValueError on every rank where what is to be saved is not finite on one of them. Collective."""
        if not self.config.checkpoint.save:
            return
        found = first_non_finite((entry.name, entry.tensor) for entry in self.engine.checkpoints.entries())
        where = next(filter(None, gather(self.state.world.handle, None if found is None else str(found))), None)
        if where is not None:
            self.saves.finish()
            raise ValueError(f"iteration {self.iteration} is not saved, since it is not finite: {where}")

    def _compare_replicas_if(self, due: bool) -> None:
        """Ends the run where replicas differ, once the checkpoint that is being written is complete: it is good."""
        if not (due and self.config.parallel.check_replicas_interval and self.replicas.compares):
            return
        try:
            with self.watch.timers("compare_replicas"):
                self.replicas(self.iteration)
        except ReplicaError:
            self.saves.finish()
            raise

    def close(self) -> None:
        self.saves.close()
        self.reporter.close()
        self.engine.close()


def _due(iteration: int, interval: int | None) -> bool:
    return interval is not None and interval > 0 and iteration % interval == 0
