"""Reports on the first rank: console, log.jsonl, TensorBoard and callbacks."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from megasnn.telemetry.callback import Callback
from megasnn.telemetry.log import BestEffort, Console, JsonLog
from megasnn.telemetry.operations import LayerOperations, describe_operations, operation_scalars
from megasnn.telemetry.records import (
    EvaluationRecord,
    IterationRecord,
    RunOutline,
    StepResult,
    format_evaluation,
    format_for_terminal,
    format_iteration,
    record_values,
    scalars_of,
)
from megasnn.telemetry.spikes import LayerSpikes, mean_spikes
from megasnn.telemetry.tensorboard import TensorBoard

_TRAINING_NAMES = {"top1": "accuracy"}


class Reporter:
    """Reports a run while it trains.

    Args:
        is_writer: False on all ranks but the first: they report nothing.

    Attributes:
        best_effort: contexts for other reporting code.
        asked_to_stop: a callback has raised SystemExit or KeyboardInterrupt.
        multiply_adds: per sample, forward only.
    """

    def __init__(self, outline: RunOutline, is_writer: bool, callbacks: Sequence[Callback] = ()) -> None:
        self._outline = outline
        self._console = Console(quiet=not is_writer)
        self.best_effort = BestEffort(self._console.line)
        self.asked_to_stop = False
        self.multiply_adds = 0
        self._done = 0
        continued_iteration = None
        if outline.continued is not None:
            self._done, _ = outline.continued
            continued_iteration = self._done
        self._iteration = self._done
        if is_writer:
            self._callbacks = callbacks
            self._log = JsonLog(outline.log_directory)
            self.board = TensorBoard(outline.directory, self.best_effort, continued_iteration)
        else:
            # All ranks call the same methods, which write nothing here.
            self._callbacks = ()
            self._log = JsonLog(None)
            self.board = TensorBoard(None, self.best_effort)
        self.begin()

    def begin(self) -> None:
        """Starts the clocks; earlier time counts for no iteration."""
        now = time.perf_counter()
        self._interval_start = now
        self._steps: list[StepResult] = []
        self._pace_start = (now, self._done)  # time and iteration from which the time left is estimated
        self._has_logged = False

    def line(self, text: str) -> None:
        """Prints, and writes to log.jsonl as a message."""
        self._console.line(text)
        self.entry("message", {"text": text})

    def entry(self, kind: str, values: Mapping[str, Any]) -> None:
        """Writes to log.jsonl only; `JsonLog` lists the kinds."""
        with self.best_effort(f"writing {self._log.path}"):
            self._log.add(kind, values)

    def flags(self, values: Mapping[str, bool | int | float | str]) -> None:
        """Calls `Callback.start`, and writes TensorBoard's hyperparameters. values: flags to compare runs by."""
        self.board.hyperparameters(values)
        self._call("start", self._outline, values)

    def step(self, result: StepResult) -> None:
        self._steps.append(result)
        self._iteration += 1
        self._console.advance(self._iteration, self._outline.iterations)
        self._call("step", self._iteration, result)

    def first_step(self, result: StepResult, interval: int, seconds: float) -> None:
        """Tells that the training runs, before the first log line.

        Args:
            seconds: since the program's start.
        """
        self.line(
            f"first step, iteration {self._iteration}: loss {result.loss:.4f}, {seconds:.1f} s after the start; "
            f"a log line comes every {interval} iterations"
        )

    def log(
        self,
        iteration: int,
        samples: int,
        more: Mapping[str, float],
        layers: Sequence[LayerSpikes] = (),
        skipped_samples: int = 0,
    ) -> None:
        """Writes log line and scalars, for the iterations since the last one.

        Args:
            samples: consumed so far.
            skipped_samples: broken samples replaced so far.
        """
        record = self._record(iteration, samples, skipped_samples)
        form = format_for_terminal if self._console.is_terminal else format_iteration
        self._console.line(form(record))
        spikes = {}
        for layer in layers:
            statistics = asdict(layer)
            spikes[statistics.pop("name")] = statistics
        self.entry("iteration", {**record_values(record), **more, "layers": spikes})
        scalars = {**scalars_of(record), **mean_spikes(layers), **more}
        self.board.scalars(scalars, iteration)
        # By itself TensorBoard's writer waits for two minutes, and a killed run would lose them.
        self.board.flush()
        self._call("log", record, scalars)

    def _record(self, iteration: int, samples: int, skipped_samples: int) -> IterationRecord:
        now = time.perf_counter()
        elapsed = (now - self._interval_start) / len(self._steps)
        self._interval_start = now
        steps = self._steps
        self._steps = []
        last = steps[-1]
        # Steps may have unequal batches: metrics are means over samples, and the loss is the mean of the steps'.
        trained = sum(step.samples for step in steps)
        metrics = {}
        for name in last.sums:
            metrics[_TRAINING_NAMES.get(name, name)] = sum(step.sums[name] for step in steps) / trained
        loss = sum(step.loss for step in steps) / len(steps)
        samples_per_second = trained / (len(steps) * elapsed)
        units = self._outline.train_units
        if units is not None:
            speed = {"tokens_per_second": samples_per_second * units.tokens}
            metrics = {**units.figures(loss), **metrics, **speed}
        return IterationRecord(
            iteration=iteration,
            train_iters=self._outline.iterations,
            epoch=samples / self._outline.epoch_samples,
            consumed_samples=samples,
            elapsed_ms=1000 * elapsed,
            learning_rate=last.learning_rate,
            global_batch_size=last.samples,
            loss=loss,
            metrics=metrics,
            grad_norm=last.grad_norm,
            samples_per_second=samples_per_second,
            seconds_left=self._seconds_left(iteration),
            skipped_iterations=sum(step.skipped for step in steps),
            nan_iterations=sum(not math.isfinite(step.loss) for step in steps),
            skipped_samples=skipped_samples,
        )

    def _seconds_left(self, iteration: int) -> float:
        now = time.perf_counter()
        began, first = self._pace_start
        if not self._has_logged:
            # The first steps compile kernels. Later estimates start at the first log line, without them.
            self._has_logged = True
            self._pace_start = (now, iteration)
        return (self._outline.iterations - iteration) * (now - began) / max(iteration - first, 1)

    def evaluation(self, record: EvaluationRecord, operations: Sequence[LayerOperations] = ()) -> None:
        """`operations`: by layer, in model order."""
        units = self._outline.valid_units
        if units is not None:
            record = replace(record, metrics={**units.figures(record.loss), **record.metrics})
        self._console.line(format_evaluation(record))
        if operations:
            self._console.line(describe_operations(operations, self.multiply_adds))
        record = replace(record, operations=operation_scalars(operations))
        layers = {each.name: {"macs": each.effective_macs, "acs": each.effective_acs} for each in operations}
        self.entry("validation", {**record_values(record), "layers": layers})
        self.board.scalars(scalars_of(record), record.iteration)
        self.board.flush()
        self._call("evaluation", record)

    def report_save(self, iteration: int, path: Path) -> None:
        self._call("save", iteration, path)

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Excludes the time inside, such as a save."""
        began = time.perf_counter()
        yield
        self._interval_start += time.perf_counter() - began

    def _call(self, method: str, *values: object) -> None:
        for callback in self._callbacks:
            name = f"{type(callback).__name__}.{method}"
            try:
                with self.best_effort(name):
                    getattr(callback, method)(*values)
            # No subclasses of Exception, so `best_effort` lets both pass.
            except (SystemExit, KeyboardInterrupt) as asked:
                self.line(f"{name} asks for the end of the run ({type(asked).__name__}), as a signal does")
                self.asked_to_stop = True

    def close(self) -> None:
        self._console.close_bar()
        self._call("end", self._iteration)
        self.board.close()
