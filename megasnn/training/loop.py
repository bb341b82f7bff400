"""The loop of a run: iterations, exit conditions, evaluation, log."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace

from megasnn.comm.statistics import statistics
from megasnn.config import PretrainConfig
from megasnn.data import BatchLoader, Datasets, GlobalBatch, epoch_samples, open_datasets, order_identity
from megasnn.data_parallel import ReplicaCheck, ReplicaError
from megasnn.engine import Engine
from megasnn.engine.setup import parameter_names
from megasnn.grid import HOLDING_AXES
from megasnn.models.building import describe
from megasnn.optim import require_matches
from megasnn.parallel_state import ParallelState
from megasnn.preprocess.sample import shards_of_sample
from megasnn.process.fault import placed
from megasnn.process.signals import StopSignals
from megasnn.telemetry.callback import Callback
from megasnn.telemetry.memory import memory_scalars
from megasnn.telemetry.reporter import Reporter, RunOutline
from megasnn.training.introduction import introduce, log_folder
from megasnn.training.memory import MemoryForecast, announce, compare, forecast_memory
from megasnn.training.pictures import Pictures
from megasnn.training.profile import PipelineProfiler, report
from megasnn.training.saving import Saves, refuse_other_model
from megasnn.training.watch import Watch


class TrainingRun:
    """One rank's side of a run.

    Args:
        callbacks: are told what happens, on the first rank.

    Attributes:
        engine: the model, its optimizer, and the steps.
        length: of the whole training.
        stop: signals that ask for the end.
        saved: False when the last checkpoint that should be there is not.
    """

    def __init__(
        self,
        config: PretrainConfig,
        state: ParallelState,
        stop: StopSignals | None = None,
        callbacks: Sequence[Callback] = (),
    ) -> None:
        self.stop, self.saved = stop or StopSignals(state.rank), True
        self.config, self.state, self._callbacks = config, state, callbacks
        self._started = time.monotonic()
        refuse_other_model(config, state)
        model, training = config.model, config.training
        require_matches(config.optimizer, parameter_names(describe(model, config.neuron.spec)))
        with placed("while opening the data"):
            self.datasets: Datasets = open_datasets(config.data, model.input_shape, model.num_classes, shards_of_sample)
        last_batch = config.data.last_batch
        samples = epoch_samples(len(self.datasets.train), training.global_batch_size, last_batch)
        self.length = training.length(samples, keeps_last_batch=last_batch == "keep")
        dataset = order_identity(self.datasets.train, training.global_batch_size, last_batch)
        self.engine = Engine(config, length=self.length)
        distributed = self.engine.distributed
        self.watch = Watch(distributed, state, self.engine.timers)
        profiles = config.logging.profile_pipeline
        self.profiler = PipelineProfiler(distributed, self.engine.plan, state) if profiles else None
        self.pictures = Pictures(config.logging, distributed.model, self.datasets, state, self.watch.rasters)
        self.saves = Saves(config, self.engine, state, dataset)
        self.replicas = ReplicaCheck(
            self.saves.entries,
            {axis: state.group(axis) for axis in HOLDING_AXES},
            state.world,
            state.communicators.wire,
            mends=config.parallel.replica_mismatch == "majority",
        )
        self.reporter: Reporter | None = None
        self._memory: list[MemoryForecast] = []
        self._skipped_samples = 0
        self._prepared = False

    @placed("while starting the run")
    def start(self) -> None:
        """Loads what the run starts from, and introduces it in the log."""
        distributed, plan = self.engine.distributed, self.engine.plan
        begin = self.saves.load()
        self.engine.iteration, self.engine.consumed_samples = begin.iteration, begin.consumed_samples
        # What only evaluates continues no log, and removes nothing of one.
        resumed = (self.iteration, self.consumed_samples) if 0 < self.iteration and self.iterations else None
        logging = self.config.logging
        outline = RunOutline(
            self.iterations,
            self.length.epoch_samples,
            logging.tensorboard_dir,
            log_folder(self.config),
            logging.log_throughput,
            resumed,
        )
        self.reporter = Reporter(outline, self.state.rank == 0, self._callbacks)
        self.saves.report, self.saves.complete = self.reporter.line, self.reporter.saved
        epoch = self.length.epoch_samples
        introduce(self.config, distributed, plan, self.state, self.length, epoch, self.reporter, self.iteration)
        if not self.config.training.evaluate_only:
            self._memory = forecast_memory(
                self.config, distributed, self.engine.optimizer, plan, self.state, self.reporter
            )
        announce(self._memory, self.reporter)
        if begin.notice:
            self.reporter.line(begin.notice)
        if self.config.training.evaluate_only:
            what = "weights" if self.engine.average is None else "average of the weights"
            self.reporter.line(f"evaluating the {what} of iteration {self.iteration}")
            return
        if self.iteration >= self.iterations:
            self.reporter.line(f"iteration {self.iteration} of {self.iterations} is reached already: evaluating only")
        if self.iteration:
            self.reporter.line(f"continuing at iteration {self.iteration}, {self.consumed_samples} samples consumed")

    @property
    def iterations(self) -> int:
        return self.length.iterations

    @property
    def iteration(self) -> int:
        """Optimizer steps done, over all runs that this one continues."""
        return self.engine.iteration

    @property
    def consumed_samples(self) -> int:
        """Training samples used; the place in the data."""
        return self.engine.consumed_samples

    def train(self) -> None:
        """Until the last iteration, until one of the exit conditions, or until a signal; saves at the end.

        With --evaluate-only, one evaluation.
        """
        assert self.reporter is not None
        self.engine.distributed.wants_to_stop = self._wants_to_stop
        with self.stop:
            if self.config.training.evaluate_only:
                self._evaluate_if(True)
                return
            self._compare_replicas_if(True)
            # What was sent and how long it took until here is no part of any iteration.
            statistics.reset()
            statistics.enable()
            self.reporter.begin()
            with closing(self._loader().batches(self.consumed_samples)) as batches:
                while self.iteration < self.iterations:
                    with self.watch.timers("data"), placed("while reading a batch"):
                        batch = next(batches)
                    self._iterate(batch)
                    if self._should_exit():
                        break
            if self.engine.distributed.stop_votes:
                self.reporter.line(f"asked to stop: the run ends at iteration {self.iteration} of {self.iterations}")
            self._evaluate_if(self.config.logging.eval_iters != 0 and not self.engine.distributed.stop_votes)
            self._save_if(True)
            self.saved = self.saves.finish()
            compare(self._memory, self.state, self.reporter)

    def _iterate(self, batch: GlobalBatch) -> None:
        logging, options = self.config.logging, self.config.checkpoint
        number = self.iteration + 1
        logs = self._logs(number)
        assert self.reporter is not None
        self.watch.spikes.enabled = logs
        self.pictures.begin(batch, self.iteration, self.reporter)
        with self._profiled(number, batch):
            result = self.engine.train_on(batch)
        self.watch.spikes.enabled = False
        self._skipped_samples += sum(len(micro.skipped) for micro in batch.micro_batches)
        if not self._prepared:
            self.saves.prepare()
            self._prepared = True
        if result.not_finite:
            self.reporter.line(result.not_finite)
        self.reporter.step(result)
        if logs:
            measured = self.watch.since_last(self.iteration)
            predicted = memory_scalars([each.total for each in self._memory], "predicted")
            skipped = self._over_replicas(self._skipped_samples)
            self.reporter.log(
                self.iteration, self.consumed_samples, {**measured.scalars, **predicted}, measured.layers, skipped,
                measured.unfit_tensors,
            )  # fmt: skip
            self.pictures.add(self.iteration, measured.layers)
        self.pictures.end(self.iteration, self.reporter, last=self.iteration == self.iterations)
        if self.engine.distributed.stop_votes:
            return
        last = self.iteration == self.iterations
        self._evaluate_if(_due(self.iteration, logging.eval_interval) and logging.eval_iters != 0 and not last)
        saves = (_due(self.iteration, options.save_interval) or self.saves.at_best(self.iteration)) and not last
        self._compare_replicas_if(_due(self.iteration, self.config.parallel.replica_interval) and not (saves or last))
        self._save_if(saves)

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
        assert self.reporter is not None
        with self.reporter.pause():
            profile = self.profiler.profile(self.engine.windows * len(batch.micro_batches))
            report(profile, self.reporter, number, batch.consumed_samples)

    def _loader(self, training: bool = True) -> BatchLoader:
        config, state = self.config, self.state
        dataset = self.datasets.train if training else self.datasets.valid
        assert dataset is not None
        return BatchLoader(
            dataset,
            seed=config.training.seed,
            shuffle=config.data.shuffle,
            augment=config.data.augment,
            global_batch_size=config.training.global_batch_size,
            micro_batch_size=config.training.micro_batch_size,
            dp_size=state.data.size,
            dp_rank=state.data.rank,
            need_images=self.engine.takes_images,
            need_labels=self.engine.takes_labels,
            num_workers=config.data.num_workers,
            skip_broken=config.data.skip_broken_samples,
            training=training,
            pin_for=state.device if state.device.type == "cuda" else None,
            last_batch=config.data.last_batch,
        )

    def _should_exit(self) -> bool:
        return _due(self.iteration, self.config.training.exit_interval) or self.engine.distributed.stop_votes > 0

    def _wants_to_stop(self) -> bool:
        """After a signal to this rank; after so many minutes by the first rank's clock, since clocks differ."""
        minutes = self.config.training.exit_duration_in_mins
        late = minutes is not None and time.monotonic() - self._started > 60 * minutes
        return self.stop.requested is not None or (late and self.state.rank == 0)

    def _over_replicas(self, skipped_samples: int) -> int:
        """This rank's broken samples that were replaced -> those of all replicas; 0 where that is not allowed."""
        if not self.config.data.skip_broken_samples:
            return 0
        # All ranks of a replica that read images come to the same choice.
        mine = skipped_samples if self.engine.takes_images and self.state.tensor.rank == 0 else 0
        return int(self.engine.distributed.sum_over_ranks([float(mine)])[0])

    @placed("while evaluating")
    def _evaluate_if(self, due: bool) -> None:
        if not due or self.datasets.valid is None:
            return
        assert self.reporter is not None
        statistics.enable(False)  # what is logged is the traffic of training
        limit, loader = self.config.logging.eval_iters, self._loader(training=False)
        if self.engine.average is not None:
            self.saves.settle()  # its values take the weights' place
        with self.reporter.pause(), closing(loader.batches(limit=limit)) as batches:
            record = self.engine.evaluate_on(batches)
            skipped = self._over_replicas(loader.skipped)
        statistics.enable()
        self.saves.found(self.iteration, record.top1)
        self.reporter.evaluation(replace(record, skipped_samples=skipped))

    @placed("while saving")
    def _save_if(self, due: bool) -> None:
        if not due:
            return
        assert self.reporter is not None
        self._compare_replicas_if(True)
        with self.reporter.pause():
            self.saves.save(self.iteration, self.consumed_samples)

    def _compare_replicas_if(self, due: bool) -> None:
        """Ends the run where replicas differ, once the checkpoint that is being written is complete: it is good."""
        if not (due and self.config.parallel.replica_interval and self.replicas.compares):
            return
        assert self.reporter is not None
        try:
            with self.watch.timers("compare_replicas"):
                mended = self.replicas(self.iteration)
        except ReplicaError:
            self.saves.finish()
            raise
        if mended:
            self.engine.distributed.refresh_copies()
            self.reporter.line(f"WARNING: {mended}")
            self.reporter.text("replicas", mended)

    def close(self) -> None:
        assert self.reporter is not None
        self.saves.close()
        self.reporter.close()


def _due(iteration: int, interval: int | None) -> bool:
    return interval is not None and interval > 0 and iteration % interval == 0
