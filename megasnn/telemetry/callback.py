"""Hooks into a run, for experiment trackers and other user code."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from megasnn.telemetry.records import EvaluationRecord, IterationRecord, RunOutline, StepResult


class Callback:
    """Override the methods you need.

    They run on the first rank only, and must not wait for other ranks. An exception becomes one warning, and training
    goes on. SystemExit and KeyboardInterrupt stop the run as a signal does: all ranks finish the next step, save it,
    and exit with status 0.
    """

    def start(self, outline: RunOutline, flags: Mapping[str, bool | int | float | str]) -> None:
        """Called before the first step. `flags`: the ones to compare runs by."""

    def step(self, iteration: int, result: StepResult) -> None:
        """Called after each optimizer step."""

    def log(self, record: IterationRecord, scalars: Mapping[str, float]) -> None:
        """Called at each log line (--log-interval). scalars: TensorBoard values, such as "training/loss"."""

    def evaluation(self, record: EvaluationRecord) -> None:
        """Called after each evaluation."""

    def save(self, iteration: int, path: Path) -> None:
        """Called when the checkpoint in `path` is complete; with --async-save from another thread."""

    def end(self, iteration: int) -> None:
        """Called at the end, also after a signal; not after an error."""
