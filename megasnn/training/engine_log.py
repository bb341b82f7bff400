"""Logs for a user's own loop around an Engine."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType

from megasnn.engine import Engine
from megasnn.engine.build import ENDLESS
from megasnn.parallel.traffic import traffic
from megasnn.telemetry.callback import Callback
from megasnn.telemetry.records import EvaluationRecord, RunOutline, StepResult
from megasnn.telemetry.reporter import Reporter
from megasnn.training.metrics import Metrics
from megasnn.training.startup_log import record_configuration


class EngineLog:
    """Console, log.jsonl, TensorBoard and callbacks, as in a run.

    Example::

        with megasnn.EngineLog(engine, "runs/own", callbacks=[megasnn.Wandb(project="snn")]) as log:
            for images, labels in batches:
                log.step(engine.train_step(images, labels))
            log.evaluation(engine.evaluate(test_images, test_labels))

    All methods are collective. The first rank writes.

    Args:
        folder: for log.jsonl and TensorBoard; None for neither.
        epoch_samples: training samples in an epoch; None for one global batch.
    Raises:
        ValueError: the Engine's training has no length.
    """

    def __init__(
        self,
        engine: Engine,
        folder: str | os.PathLike[str] | None = None,
        *,
        log_interval: int = 10,
        epoch_samples: int | None = None,
        callbacks: Sequence[Callback] = (),
    ) -> None:
        iterations = engine.length.iterations
        if iterations >= ENDLESS:
            raise ValueError("the log needs the training's length: give the Engine train_iters or train_samples")
        if log_interval < 1:
            raise ValueError(f"log_interval is a number of iterations from 1 on, not {log_interval}")
        self._engine = engine
        self._interval = log_interval
        self._iterations = iterations
        self._first = engine.iteration + 1
        self._started = time.monotonic()
        continued = (engine.iteration, engine.consumed_samples) if engine.iteration else None
        samples = epoch_samples or engine.config.training.global_batch_size
        directory = None if folder is None else Path(folder)
        outline = RunOutline(iterations, samples, directory, directory, continued)
        self._reporter = Reporter(outline, engine.state.rank == 0, callbacks)
        self._metrics = Metrics(engine)
        self._counting = ExitStack()
        self._counting.enter_context(traffic.counting())
        record_configuration(engine.config, engine, self._reporter)
        self._metrics.spikes.enabled = self._is_due(self._first)
        self._reporter.begin()

    def _is_due(self, iteration: int) -> bool:
        return iteration % self._interval == 0 or iteration == self._iterations

    def step(self, result: StepResult) -> None:
        """Logs `Engine.train_step`'s result."""
        engine = self._engine
        self._reporter.step(result)
        if self._is_due(engine.iteration):
            measured, layers = self._metrics.since_last(engine.iteration)
            self._reporter.log(engine.iteration, engine.consumed_samples, measured, layers)
        elif engine.iteration == self._first:
            self._reporter.first_step(result, self._interval, time.monotonic() - self._started)
        # Counting takes time, so only steps with a log line count spikes.
        self._metrics.spikes.enabled = self._is_due(engine.iteration + 1)

    def evaluation(self, record: EvaluationRecord) -> None:
        """Logs `Engine.evaluate`'s result."""
        self._reporter.evaluation(record)

    def line(self, text: str) -> None:
        """Writes the user's own line to console and log.jsonl."""
        self._reporter.line(text)

    def close(self) -> None:
        """Ends the callbacks' runs and closes the files."""
        self._metrics.spikes.enabled = False
        self._counting.close()
        self._reporter.close()

    def __enter__(self) -> EngineLog:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
