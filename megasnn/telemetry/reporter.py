"""What a run reports while it trains, from rank 0: lines on a terminal or file, the JSON log, TensorBoard."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megasnn.telemetry.callback import Callback
from megasnn.telemetry.json_log import JsonLog
from megasnn.telemetry.logline import (
    EvaluationRecord,
    IterationRecord,
    StepResult,
    format_evaluation,
    format_iteration,
    scalars_of,
)
from megasnn.telemetry.progress import Progress
from megasnn.telemetry.spikes import LayerSpikes, mean_spikes
from megasnn.telemetry.tensorboard import Flag, TensorBoard
from megasnn.telemetry.tried import Tried

METRICS = ("training/loss", "training/accuracy", "training/samples_per_second", "validation/loss",
           "validation/accuracy_top1")  # fmt: skip
_PACE = 10  # log intervals that the time left is reckoned from


@dataclass(frozen=True)
class RunOutline:
    """What a reporter knows of a run beforehand.

    Attributes:
        iterations: of the whole run.
        epoch_samples: training samples of an epoch.
        directory: of TensorBoard; None writes nothing there.
        log_directory: of the JSON log; None writes none.
        throughput: whether samples per second are in the log line.
        resumed: (iteration, consumed samples) that the run continues from; later points of an earlier run go.
    """

    iterations: int
    epoch_samples: int
    directory: str | Path | None = None
    log_directory: str | Path | None = None
    throughput: bool = True
    resumed: tuple[int, int] | None = None


@dataclass
class _Interval:
    """What has come together since the last log line."""

    started: float
    steps: list[StepResult] = field(default_factory=list)


class Reporter:
    """Writes what a run reports while it trains.

    Args:
        is_writer: True on the one rank that writes; the others keep quiet.
        callbacks: are told the same on that rank.

    Attributes:
        tried: runs other code that only reports.
        asked_to_stop: whether a callback has asked for the end of the run.
    """

    def __init__(self, outline: RunOutline, is_writer: bool, callbacks: Sequence[Callback] = ()) -> None:
        self._outline, self._callbacks = outline, callbacks if is_writer else ()
        done, samples = outline.resumed or (0, 0)
        self._progress = Progress(outline.iterations, done, quiet=not is_writer)
        self._log = JsonLog(outline.log_directory if is_writer else None)
        self.tried, self.asked_to_stop = Tried(self.line), False
        directory = outline.directory if is_writer else None
        self._board = TensorBoard(directory, done if outline.resumed else None, samples, self.line)
        self._done = self._iteration = done
        self.begin()

    def begin(self) -> None:
        """Starts the clocks: training begins now, and the time before it counts for no iteration."""
        now = time.perf_counter()
        self._interval = _Interval(now)
        self._pace = deque([(now, self._done)], maxlen=_PACE + 1)
        self._warm: tuple[float, int] | None = None

    def line(self, text: str) -> None:
        """A line for people; the JSON log has it as a message."""
        self._progress.line(text)
        self.entry("message", {"text": text})

    def entry(self, kind: str, values: Mapping[str, Any]) -> None:
        """A line of the JSON log only; see there for kinds."""
        with self.tried("an entry of the log"):
            self._log.add(kind, values)
        self.tried.until_done(f"writing {self._log.path}", self._log.flush)

    def text(self, tag: str, markdown: str) -> None:
        self._board.text(tag, markdown)

    def flags(self, values: Mapping[str, Flag]) -> None:
        """Once, before the first step: what runs are compared by, beside their last losses and accuracies."""
        self._board.flags(values, METRICS)
        self._call("start", self._outline, values)

    def picture(self, tag: str, draw: Callable[[], NDArray[np.uint8]], iteration: int) -> None:
        """`draw` makes uint8 `[height, width, 3]` for TensorBoard; it is called where that is written."""
        self._board.picture(tag, draw, iteration)

    def scalars(self, values: dict[str, float], iteration: int, samples: int) -> None:
        """For TensorBoard and the JSON log, beside those that come with a log line."""
        self._board.scalars(values, iteration, samples)
        self.entry("scalars", {"iteration": iteration, "consumed_samples": samples, **values})

    def step(self, result: StepResult) -> None:
        """Once for each iteration."""
        self._interval.steps.append(result)
        self._iteration += 1
        self._warm = self._warm or (time.perf_counter(), self._done + 1)
        self._progress.advance(loss=f"{result.loss:.3f}", accuracy=f"{result.correct / result.samples:.0%}")
        self._call("step", self._iteration, result)

    def log(
        self,
        iteration: int,
        samples: int,
        more: Mapping[str, float],
        layers: Sequence[LayerSpikes] = (),
        skipped_samples: int = 0,
    ) -> None:
        """The log line and the scalars of the iterations since the last one.

        Args:
            samples: consumed up to here.
            more: goes to TensorBoard and the JSON log only, as the layers do.
        """
        record = self._record(iteration, samples, skipped_samples)
        self._progress.line(format_iteration(record, self._outline.throughput))
        spikes = {layer.name: {k: v for k, v in asdict(layer).items() if k != "name"} for layer in layers}
        self.entry("iteration", {**asdict(record), **more, "layers": spikes})
        scalars = {**scalars_of(record), **mean_spikes(layers), **more}
        self._board.scalars(scalars, iteration, samples)
        self._board.flush()
        self.tried.again()
        self._call("log", record, scalars)

    def _record(self, iteration: int, samples: int, skipped_samples: int) -> IterationRecord:
        now = time.perf_counter()
        interval, self._interval = self._interval, _Interval(now)
        steps, last = interval.steps, interval.steps[-1]
        elapsed = (now - interval.started) / len(steps)
        trained = sum(step.samples for step in steps)
        return IterationRecord(
            iteration=iteration,
            train_iters=self._outline.iterations,
            epoch=samples / self._outline.epoch_samples,
            consumed_samples=samples,
            elapsed_ms=1000 * elapsed,
            learning_rate=last.learning_rate,
            global_batch_size=last.samples,
            # A mean with a nan in it is nan: it is shown, not averaged away.
            loss=sum(step.loss for step in steps) / len(steps),
            accuracy=sum(step.correct for step in steps) / trained,
            grad_norm=last.grad_norm,
            samples_per_second=trained / (len(steps) * elapsed),
            seconds_left=self._seconds_left(iteration),
            skipped_iterations=sum(step.skipped for step in steps),
            nan_iterations=sum(not math.isfinite(step.loss) for step in steps),
            skipped_samples=skipped_samples,
        )

    def _seconds_left(self, iteration: int) -> float:
        """At the pace of the last few log intervals, evaluations and saves included.

        Without the first step, which pays for compiling, as soon as there is another.
        """
        now = time.perf_counter()
        if self._warm is not None and iteration > self._warm[1]:
            self._pace[0] = max(self._pace[0], self._warm)
        then, before = self._pace[0]
        self._pace.append((now, iteration))
        return (self._outline.iterations - iteration) * (now - then) / max(iteration - before, 1)

    def evaluation(self, record: EvaluationRecord) -> None:
        self._progress.line(format_evaluation(record))
        self.entry("validation", asdict(record))
        self._board.scalars(scalars_of(record), record.iteration, record.consumed_samples)
        self._board.flush()
        self._call("evaluation", record)

    def saved(self, iteration: int, path: Path) -> None:
        """A checkpoint is complete."""
        self._call("save", iteration, path)

    def pause(self) -> _Pause:
        """A context whose time does not count as training time (evaluation, saving)."""
        return _Pause(self._interval)

    def _call(self, method: str, *values: object) -> None:
        for callback in self._callbacks:
            name = f"{type(callback).__name__}.{method}"
            try:
                with self.tried(name):
                    getattr(callback, method)(*values)
            except (SystemExit, KeyboardInterrupt) as asked:
                self.line(f"{name} asks for the end of the run ({type(asked).__name__}), as a signal does")
                self.asked_to_stop = True

    def close(self) -> None:
        self._call("end", self._iteration)
        self.tried.again()
        self._progress.close()
        self._board.close()


class _Pause:
    def __init__(self, interval: _Interval) -> None:
        self._interval, self._began = interval, 0.0

    def __enter__(self) -> None:
        self._began = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        self._interval.started += time.perf_counter() - self._began
