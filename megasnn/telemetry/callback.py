"""Calls of a run to code of one's own, such as another tracker of experiments."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from megasnn.telemetry.records import EvaluationRecord, IterationRecord, RunOutline, StepResult


class Callback:
    """Methods that a run calls when something has happened; a subclass overrides those that it wants to know of.

    They are called on the first rank only, for what all ranks know alike: a method must not wait for other ranks. The
    records are those of the log, the JSON log and TensorBoard. An exception ends no run: a warning tells it once, and
    the method is called again the next time. SystemExit and KeyboardInterrupt end it on all ranks as a signal does:
    after the next step, which is saved, with the exit status 0.
    """

    def start(self, outline: RunOutline, flags: Mapping[str, bool | int | float | str]) -> None:
        """Before the first step: how long the run is, and the flags by which runs are compared."""

    def step(self, iteration: int, result: StepResult) -> None:
        """After each optimizer step."""

    def log(self, record: IterationRecord, scalars: Mapping[str, float]) -> None:
        """At each log line (--log-interval): the record, and all values of TensorBoard by the names of their cards."""

    def evaluation(self, record: EvaluationRecord) -> None:
        """After each evaluation."""

    def save(self, iteration: int, path: Path) -> None:
        """Called when a checkpoint is complete; with --async-save from another thread."""

    def end(self, iteration: int) -> None:
        """At the end of the run, or when it was asked to stop; not after an error."""
