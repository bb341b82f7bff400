"""The loop of a run: iterations, exit conditions, evaluation, log."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

from megasnn.comm.statistics import statistics
from megasnn.config import PretrainConfig, describe, to_json
from megasnn.data import BatchLoader, Datasets, GlobalBatch, open_datasets, order_identity
from megasnn.engine import Engine
from megasnn.parallel_state import ParallelState
from megasnn.pipeline.costs import layers_per_chunk
from megasnn.signals import StopSignals
from megasnn.telemetry.logline import EvaluationRecord
from megasnn.telemetry.reporter import Reporter
from megasnn.training.pictures import Pictures
from megasnn.training.profile import PipelineProfiler, report
from megasnn.training.saving import Saves
from megasnn.training.setup import (
    ModelProvider,
    build_context,
    micro_batch_counts,
    plan_of,
    sample_loss,
    wire_options,
)
from megasnn.training.step import TrainingStep
from megasnn.training.watch import Watch


class TrainingRun:
    """One rank's side of a run.

    Attributes:
        iteration: optimizer steps done, over all runs that this one continues.
        consumed_samples: training samples used; the place in the data.
        stop: signals that ask for the end.
        saved: False when the last checkpoint that should be there is not.
    """

    def __init__(
        self,
        config: PretrainConfig,
        model_config: object,
        provider: ModelProvider,
        state: ParallelState,
        stop: StopSignals | None = None,
    ) -> None:
        self.stop, self.saved = stop or StopSignals(state.rank), True
        self.config, self.provider, self.state = config, provider, state
        self.iteration = self.consumed_samples = 0
        self._started = time.monotonic()
        model, training, parallel = provider.description, config.training, config.parallel
        self.datasets: Datasets = open_datasets(config.data, model.input_shape, model.num_classes)
        dataset = order_identity(self.datasets.train, training.global_batch_size, config.data.last_batch)
        context = build_context(state.tensor, training.precision, config.neuron.neuron_backend, training.seed)
        counts = micro_batch_counts(training.micro_batches, state.data.size)
        profiles = config.logging.profile_pipeline
        self.plan = plan_of(model, parallel, training.micro_batch_size, counts, context, state, predicts=profiles)
        self.bounds = self.plan.bounds
        loss, wires = sample_loss(training), wire_options(parallel)
        self.engine = Engine(model, state, context, self.bounds, self.plan.schedules, training.seed, loss, wires)
        self.watch = Watch(self.engine, state)
        self.profiler = PipelineProfiler(self.engine, self.plan, state) if profiles else None
        self.pictures = Pictures(config.logging, model, self.datasets, state, self.watch.rasters)
        self.step = TrainingStep(config, self.engine, state, self.watch.timers)
        layout = layers_per_chunk(self.bounds)
        self.saves = Saves(config, model_config, provider, self.engine, self.step.optimizer, state, dataset, layout)
        self.reporter: Reporter | None = None
        self._skipped_samples = 0
        self._prepared = False

    def start(self) -> None:
        """Loads what the run starts from, and introduces it in the log."""
        begin = self.saves.load()
        self.iteration, self.consumed_samples = begin.iteration, begin.consumed_samples
        resumed = (self.iteration, self.consumed_samples) if self.iteration else None
        logging = self.config.logging
        self.reporter = Reporter(
            logging.tensorboard_dir, self.iterations, self.state.rank == 0, logging.log_throughput, resumed
        )
        self.saves.report = self.reporter.line
        self._introduce(self.reporter, begin.notice)

    def _introduce(self, reporter: Reporter, notice: str) -> None:
        config, engine = self.config, self.engine
        table = describe(config)
        reporter.line(table)
        reporter.text("configuration", "    " + table.replace("\n", "\n    "))
        layers = [layer.name for layer in self.provider.description.layers]
        chunks = [f"{layers[span.start]} .. {layers[span.stop - 1]}" if span else "nothing" for span in self.bounds]
        reporter.line(
            f"{engine.parameters:,} parameters on {self.state.grid}; "
            f"pipeline layout {layers_per_chunk(self.bounds)}: " + "; ".join(chunks)
        )
        forecast = self.plan.describe(config.parallel.pipeline_schedule)
        if forecast:
            reporter.text("pipeline", forecast)
        for text in (forecast, notice):
            if text:
                reporter.line(text)
        if self.iteration >= self.iterations:
            reporter.line(f"iteration {self.iteration} of {self.iterations} is reached already: evaluating only")
        if self.iteration:
            reporter.line(f"continuing at iteration {self.iteration}, {self.consumed_samples} samples consumed")
        folder = config.checkpoint.save or config.logging.tensorboard_dir
        if folder is not None and self.state.rank == 0:
            Path(folder).mkdir(parents=True, exist_ok=True)
            (Path(folder) / "config.json").write_text(to_json(config))

    @property
    def iterations(self) -> int:
        return self.config.training.iterations

    def train(self) -> None:
        """Until the last iteration, until one of the exit conditions, or until a signal; saves at the end."""
        assert self.reporter is not None
        self.engine.wants_to_stop = self._wants_to_stop
        with self.stop:
            with closing(self._loader().batches(self.consumed_samples)) as batches:
                while self.iteration < self.iterations:
                    with self.watch.timers("data"):
                        batch = next(batches)
                    self._iterate(batch)
                    if self._should_exit():
                        break
            if self.engine.stop_votes:
                self.reporter.line(f"asked to stop: the run ends at iteration {self.iteration} of {self.iterations}")
            self._evaluate_if(self.config.logging.eval_iters != 0 and not self.engine.stop_votes)
            self._save_if(True)
            self.saved = self.saves.finish()

    def _iterate(self, batch: GlobalBatch) -> None:
        logging, options = self.config.logging, self.config.checkpoint
        number = self.iteration + 1
        logs = self._logs(number)
        assert self.reporter is not None
        self.watch.spikes.enabled = logs
        self.pictures.begin(batch, self.iteration, self.reporter)
        with self._profiled(number, batch):
            result = self.step(batch, self.iteration)
        self.watch.spikes.enabled = False
        self.iteration += 1
        self.consumed_samples = batch.consumed_samples
        self._skipped_samples += sum(len(micro.skipped) for micro in batch.micro_batches)
        if not self._prepared:
            self.saves.prepare()
            self._prepared = True
        if result.not_finite:
            self.reporter.line(result.not_finite)
        self.reporter.step(result.loss, skipped=not result.finite)
        if logs:
            more = self.watch.since_last(self.iteration)
            skipped = self._over_replicas(self._skipped_samples)
            self.reporter.log(
                self.iteration,
                self.consumed_samples,
                result.rate,
                batch.size,
                result.norm,
                more,
                skipped,
                self.watch.between_stages(more),
            )
        self.pictures.end(self.iteration, self.reporter)
        if self.engine.stop_votes:
            return
        last = self.iteration == self.iterations
        self._evaluate_if(_due(self.iteration, logging.eval_interval) and logging.eval_iters != 0 and not last)
        self._save_if(_due(self.iteration, options.save_interval) and not last)

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
            profile = self.profiler.profile(len(batch.micro_batches))
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
            need_labels=self.engine.gives_logits,
            num_workers=config.data.num_workers,
            skip_broken=config.data.skip_broken_samples,
            training=training,
            pin_for=state.device if state.device.type == "cuda" else None,
            last_batch=config.data.last_batch,
        )

    def _should_exit(self) -> bool:
        return _due(self.iteration, self.config.training.exit_interval) or self.engine.stop_votes > 0

    def _wants_to_stop(self) -> bool:
        """After a signal to this rank; after so many minutes by the first rank's clock, since clocks differ."""
        minutes = self.config.training.exit_duration_in_mins
        late = minutes is not None and time.monotonic() - self._started > 60 * minutes
        return self.stop.requested is not None or (late and self.state.rank == 0)

    def _over_replicas(self, skipped_samples: int) -> int | None:
        """This rank's broken samples that were replaced -> those of all replicas; None where that is not allowed."""
        if not self.config.data.skip_broken_samples:
            return None
        # All ranks of a replica that read images come to the same choice.
        mine = skipped_samples if self.engine.takes_images and self.state.tensor.rank == 0 else 0
        return int(self.engine.sum_over_ranks([float(mine)])[0])

    def _evaluate_if(self, due: bool) -> None:
        if not due or self.datasets.valid is None:
            return
        assert self.reporter is not None
        totals = [0.0, 0.0, 0.0, 0.0]
        statistics.enable(False)  # what is logged is the traffic of training
        limit, loader = self.config.logging.eval_iters, self._loader(training=False)
        with self.reporter.pause(), closing(loader.batches(limit=limit)) as batches:
            for batch in batches:
                parts = self.engine.evaluate(self.step.inputs(batch))
                totals = [a + b for a, b in zip(totals, parts, strict=True)]
            loss, samples, top1, top5 = self.engine.total(totals)
            skipped = self._over_replicas(loader.skipped)
        statistics.enable()
        self.reporter.evaluation(
            EvaluationRecord(
                self.iteration,
                self.consumed_samples,
                int(samples),
                loss / samples,
                top1 / samples,
                top5 / samples,
                skipped,
            )
        )

    def _save_if(self, due: bool) -> None:
        if not due:
            return
        assert self.reporter is not None
        with self.reporter.pause():
            self.saves.save(self.iteration, self.consumed_samples)

    def close(self) -> None:
        assert self.reporter is not None
        self.saves.close()
        self.reporter.close()


def _due(iteration: int, interval: int | None) -> bool:
    return interval is not None and iteration % interval == 0
