"""The evaluations of a run: when one is due, and what becomes of it; a request to stop leaves it within a batch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import closing
from dataclasses import replace

from megasnn.config import PretrainConfig
from megasnn.data import GlobalBatch
from megasnn.engine import Engine
from megasnn.engine.faults import placed
from megasnn.parallel.traffic import statistics
from megasnn.telemetry.reporter import Reporter
from megasnn.training.data import RunData
from megasnn.training.saving import Saves


class Evaluations:
    """Evaluations of one run.

    Args:
        owed: whether the run that this one continues has left one that was due.

    Attributes:
        owed: whether the one that is due after this iteration is not finished; a checkpoint keeps it, and the run that
            goes on from there makes that evaluation first.
        running: whether this is within one.
        finished: False when the last one was left, since the run was asked to stop in it.
    """

    def __init__(
        self, config: PretrainConfig, engine: Engine, data: RunData, saves: Saves, reporter: Reporter, owed: bool
    ) -> None:
        self._options, self._engine, self._data = config.logging, engine, data
        self._saves, self._reporter = saves, reporter
        self._any = data.evaluates and config.logging.eval_iters != 0
        self.owed, self.running, self.finished = owed and self._any, False, True

    def begin(self, iteration: int) -> None:
        """After a step: the evaluation that is due now is owed until it is finished."""
        interval = self._options.eval_interval
        self.owed = self._any and interval is not None and iteration % interval == 0

    def at_the_end(self) -> None:
        """The last one of a run that trains. Collective, as `run`."""
        if self._any:
            self.run()

    @placed("while evaluating")
    def run(self) -> None:
        """Evaluates, logs, and tells `Saves`; nothing counts of an evaluation that is left. Collective."""
        engine, reporter = self._engine, self._reporter
        loader = self._data.loader(engine, training=False)
        self.running = True
        of_training = statistics.counting(False)  # what is logged is the traffic of training
        with of_training, reporter.pause(), closing(loader.batches(limit=self._options.eval_iters)) as batches:
            record = engine.evaluate_on(self._until_asked_to_stop(batches))
            skipped = self._data.skipped_over_replicas(engine, loader.skipped, training=False)
        self.running = False
        due = self._data.samples_to_evaluate
        self.finished = record.samples == due
        if not self.finished:
            reporter.line(
                f"asked to stop: the evaluation at iteration {engine.iteration} was left after {record.samples} of "
                f"{due} samples, and does not count"
            )
            return
        self.owed = False
        self._saves.found(engine.iteration, record.top1)
        reporter.evaluation(replace(record, skipped_samples=skipped))

    def _until_asked_to_stop(self, batches: Iterable[GlobalBatch]) -> Iterator[GlobalBatch]:
        """The request travels with what the ranks exchange of each batch: all leave after the same one."""
        for batch in batches:
            yield batch
            if self._engine.stop_votes:
                return
