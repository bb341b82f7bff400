"""What a run reports while it trains: log lines on a terminal or file, scalars in TensorBoard, both from rank 0."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from megasnn.telemetry.logline import (
    EvaluationRecord,
    IterationRecord,
    StageTraffic,
    format_evaluation,
    format_iteration,
)
from megasnn.telemetry.progress import Progress
from megasnn.telemetry.tensorboard import TensorBoard


@dataclass
class _Interval:
    """What has come together since the last log line."""

    losses: list[float] = field(default_factory=list)
    started: float = field(default_factory=time.perf_counter)


class Reporter:
    """
    Args:
        is_writer: True on the one rank that writes; the others keep quiet.
        throughput: add samples per second to the log line.
        resumed: (iteration, consumed samples) that a run continues from; later points of an earlier run go.
    """

    def __init__(
        self,
        directory: str | Path | None,
        iterations: int,
        is_writer: bool,
        throughput: bool = False,
        resumed: tuple[int, int] | None = None,
    ) -> None:
        self._iterations, self._throughput = iterations, throughput
        done, samples = resumed or (0, 0)
        self._board = TensorBoard(directory if is_writer else None, done if resumed else None, samples)
        self._progress = Progress(iterations, done, quiet=not is_writer)
        self._interval = _Interval()
        self._skipped = self._nan = 0

    def line(self, text: str) -> None:
        self._progress.line(text)

    def text(self, tag: str, markdown: str) -> None:
        self._board.text(tag, markdown)

    def picture(self, tag: str, picture: NDArray[np.uint8], iteration: int) -> None:
        """uint8 `[height, width, 3]`, for TensorBoard."""
        self._board.picture(tag, picture, iteration)

    def scalars(self, values: dict[str, float], iteration: int, samples: int) -> None:
        """For TensorBoard, beside those that come with a log line."""
        self._board.scalars(values, iteration, samples)

    def step(self, loss: float, skipped: bool) -> None:
        """Once for each iteration."""
        self._interval.losses.append(loss)
        self._skipped += skipped
        self._nan += not math.isfinite(loss)
        self._progress.advance(loss=f"{loss:.3f}")

    def log(
        self,
        iteration: int,
        samples: int,
        rate: float,
        batch: int,
        norm: float,
        more: dict[str, float] | None = None,
        skipped_samples: int | None = None,
        between_stages: StageTraffic | None = None,
    ) -> None:
        """The log line and the scalars of the iterations since the last one; `more` goes to TensorBoard only."""
        interval, self._interval = self._interval, _Interval()
        count = max(len(interval.losses), 1)
        elapsed = (time.perf_counter() - interval.started) / count
        # A mean with a nan in it is nan: it is shown, not averaged away.
        loss = sum(interval.losses) / count
        record = IterationRecord(
            iteration=iteration,
            train_iters=self._iterations,
            consumed_samples=samples,
            elapsed_ms=1000 * elapsed,
            learning_rate=rate,
            global_batch_size=batch,
            loss=loss,
            grad_norm=norm,
            samples_per_second=batch / elapsed if self._throughput else None,
            skipped_iterations=self._skipped,
            nan_iterations=self._nan,
            skipped_samples=skipped_samples,
            between_stages=between_stages,
        )
        self._skipped = self._nan = 0
        self.line(format_iteration(record))
        scalars = {
            "loss/train": loss,
            "learning_rate": rate,
            "grad_norm": norm,
            "time/iteration_ms": 1000 * elapsed,
            "throughput/samples_per_second": batch / elapsed,
        }
        if skipped_samples is not None:
            scalars["data/skipped_samples"] = skipped_samples
        self._board.scalars({**scalars, **(more or {})}, iteration, samples)
        self._board.flush()

    def evaluation(self, record: EvaluationRecord) -> None:
        self.line(format_evaluation(record))
        scalars = {"loss/validation": record.loss, "accuracy/top1": record.top1, "accuracy/top5": record.top5}
        if record.skipped_samples is not None:
            scalars["data/skipped_validation_samples"] = record.skipped_samples
        self._board.scalars(scalars, record.iteration, record.consumed_samples)
        self._board.flush()

    def pause(self) -> _Pause:
        """A context whose time does not count as training time (evaluation, saving)."""
        return _Pause(self._interval)

    def close(self) -> None:
        self._progress.close()
        self._board.close()


class _Pause:
    def __init__(self, interval: _Interval) -> None:
        self._interval, self._began = interval, 0.0

    def __enter__(self) -> None:
        self._began = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        self._interval.started += time.perf_counter() - self._began
