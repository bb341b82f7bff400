"""Callbacks for experiment trackers. Each needs its package; MegaSNN does not install them."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any

from megasnn.telemetry.callback import Callback
from megasnn.telemetry.records import EvaluationRecord, IterationRecord, RunOutline, scalars_of

Flags = Mapping[str, bool | int | float | str]


class Tracker(Callback):
    """Sends flags, log lines and evaluations to an experiment tracker.

    Args:
        options: for the tracker's function to start a run.
    Raises:
        ImportError: the package is not installed.
    """

    package: str

    def __init__(self, **options: Any) -> None:
        # An error in `start` would only be a warning, and the run would go on without its tracker.
        if find_spec(self.package) is None:
            raise ImportError(f"{type(self).__name__} needs the package {self.package}: pip install {self.package}")
        self.options = options

    @property
    def api(self) -> Any:
        # Imported on the first rank alone, which calls the methods.
        return importlib.import_module(self.package)

    def start(self, outline: RunOutline, flags: Flags) -> None:
        self.api.init(config=dict(flags), **self.options)

    def send(self, scalars: dict[str, float], iteration: int) -> None:
        """Records values by TensorBoard name."""
        self.api.log(scalars, step=iteration)

    def log(self, record: IterationRecord, scalars: Mapping[str, float]) -> None:
        self.send(dict(scalars), record.iteration)

    def evaluation(self, record: EvaluationRecord) -> None:
        self.send(scalars_of(record), record.iteration)

    def end(self, iteration: int) -> None:
        self.api.finish()


class Wandb(Tracker):
    """Weights & Biases. Options for `wandb.init`: `project="snn"`; `id="a", resume="allow"` continues a run."""

    package = "wandb"


class Trackio(Tracker):
    """trackio. Options for `trackio.init`: `project="snn"` is required; `name="a", resume="allow"` continues a run."""

    package = "trackio"


class MLflow(Tracker):
    """MLflow. Options for `mlflow.start_run`: `run_name="a"`; `run_id=...` continues a run."""

    package = "mlflow"

    def start(self, outline: RunOutline, flags: Flags) -> None:
        self.api.start_run(**self.options)
        self.api.log_params(dict(flags))

    def send(self, scalars: dict[str, float], iteration: int) -> None:
        self.api.log_metrics(scalars, step=iteration)

    def end(self, iteration: int) -> None:
        self.api.end_run()
