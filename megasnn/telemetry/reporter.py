"""Reports of a run, from rank 0: console, log.jsonl, TensorBoard and callbacks."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
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
    format_iteration,
    record_values,
    scalars_of,
)
from megasnn.telemetry.spikes import LayerSpikes, mean_spikes
from megasnn.telemetry.tensorboard import TensorBoard

_NAMES = {"top1": "accuracy"}  # of training


class Reporter:
    """Reports a run while it trains.

    Args:
        is_writer: True on the one rank that writes; the others keep quiet.
        callbacks: are told the same on that rank.

    Attributes:
        best_effort: contexts for other code that only reports.
        board: takes texts and pictures for TensorBoard.
        asked_to_stop: True once a callback has asked for the end of the run.
        multiply_adds: of the model in a sample's forward, told beside the operations of an evaluation.
    """

    def __init__(self, outline: RunOutline, is_writer: bool, callbacks: Sequence[Callback] = ()) -> None:
        self._outline, self._callbacks = outline, callbacks if is_writer else ()
        done, _ = outline.resumed or (0, 0)
        self._console = Console(quiet=not is_writer)
        self._log = JsonLog(outline.log_directory if is_writer else None)
        self.best_effort, self.asked_to_stop = BestEffort(self._console.line), False
        directory = outline.directory if is_writer else None
        self.board = TensorBoard(directory, self.best_effort, done if outline.resumed else None)
        self._done = self._iteration = done
        self.multiply_adds = 0
        self.begin()

    def begin(self) -> None:
        """Starts the clocks: time before this counts for no iteration."""
        now = time.perf_counter()
        self._interval_start, self._steps = now, list[StepResult]()
        self._pace, self._has_logged = (now, self._done), False  # from when and where the time left is estimated

    def line(self, text: str) -> None:
        """Prints a line; log.jsonl has it as a message."""
        self._console.line(text)
        self.entry("message", {"text": text})

    def entry(self, kind: str, values: Mapping[str, Any]) -> None:
        """Writes a line of log.jsonl only; `JsonLog` lists the kinds."""
        with self.best_effort(f"writing {self._log.path}"):
            self._log.add(kind, values)

    def flags(self, values: Mapping[str, bool | int | float | str]) -> None:
        """Tells callbacks, once and before the first step, the flags by which runs are compared."""
        self._call("start", self._outline, values)

    def step(self, result: StepResult) -> None:
        """Takes the result of each iteration."""
        self._steps.append(result)
        self._iteration += 1
        self._call("step", self._iteration, result)

    def log(
        self,
        iteration: int,
        samples: int,
        more: Mapping[str, float],
        layers: Sequence[LayerSpikes] = (),
        skipped_samples: int = 0,
    ) -> None:
        """Writes the log line and the scalars of the iterations since the last one.

        Args:
            samples: consumed up to here.
            more: scalars for TensorBoard and log.jsonl only. layers: spikes, for the same.
        """
        record = self._record(iteration, samples, skipped_samples)
        self._console.line(format_iteration(record))
        spikes = {layer.name: {k: v for k, v in asdict(layer).items() if k != "name"} for layer in layers}
        self.entry("iteration", {**record_values(record), **more, "layers": spikes})
        scalars = {**scalars_of(record), **mean_spikes(layers), **more}
        self.board.scalars(scalars, iteration)
        self.board.flush()
        self._call("log", record, scalars)

    def _record(self, iteration: int, samples: int, skipped_samples: int) -> IterationRecord:
        now = time.perf_counter()
        steps, self._steps = self._steps, []
        elapsed = (now - self._interval_start) / len(steps)
        self._interval_start = now
        last, trained = steps[-1], sum(step.samples for step in steps)
        return IterationRecord(
            iteration=iteration,
            train_iters=self._outline.iterations,
            epoch=samples / self._outline.epoch_samples,
            consumed_samples=samples,
            elapsed_ms=1000 * elapsed,
            learning_rate=last.learning_rate,
            global_batch_size=last.samples,
            loss=sum(step.loss for step in steps) / len(steps),  # nan stays nan
            metrics={_NAMES.get(name, name): sum(step.sums[name] for step in steps) / trained for name in last.sums},
            grad_norm=last.grad_norm,
            samples_per_second=trained / (len(steps) * elapsed),
            seconds_left=self._seconds_left(iteration),
            skipped_iterations=sum(step.skipped for step in steps),
            nan_iterations=sum(not math.isfinite(step.loss) for step in steps),
            skipped_samples=skipped_samples,
        )

    def _seconds_left(self, iteration: int) -> float:
        """Estimates the time left from all that the run has done since its first log line, whose steps compile."""
        now, (then, before) = time.perf_counter(), self._pace
        if not self._has_logged:
            self._pace, self._has_logged = (now, iteration), True
        return (self._outline.iterations - iteration) * (now - then) / max(iteration - before, 1)

    def evaluation(self, record: EvaluationRecord, operations: Sequence[LayerOperations] = ()) -> None:
        """Writes an evaluation, and the operations of each layer, in the model's order."""
        self._console.line(format_evaluation(record))
        if operations:
            self._console.line(describe_operations(operations, self.multiply_adds))
        scalars = operation_scalars(operations)
        layers = {each.name: {"macs": each.effective_macs, "acs": each.effective_acs} for each in operations}
        self.entry("validation", {**record_values(record), **scalars, "layers": layers})
        self.board.scalars({**scalars_of(record), **scalars}, record.iteration)
        self.board.flush()
        self._call("evaluation", record)

    def saved(self, iteration: int, path: Path) -> None:
        """Tells callbacks that a checkpoint is complete."""
        self._call("save", iteration, path)

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Leaves the time inside (evaluation, saving) out of the time of an iteration."""
        began = time.perf_counter()
        yield
        self._interval_start += time.perf_counter() - began

    def _call(self, method: str, *values: object) -> None:
        for callback in self._callbacks:
            name = f"{type(callback).__name__}.{method}"
            try:
                with self.best_effort(name):
                    getattr(callback, method)(*values)
            except (SystemExit, KeyboardInterrupt) as asked:
                self.line(f"{name} asks for the end of the run ({type(asked).__name__}), as a signal does")
                self.asked_to_stop = True

    def close(self) -> None:
        self._call("end", self._iteration)
        self.board.close()
