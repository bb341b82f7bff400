"""What a run reports, and how often it evaluates."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from megasnn.config.checks import at_least, needs


@dataclass(frozen=True)
class LoggingConfig:
    """One rank writes all logs."""

    for_runs: ClassVar[bool] = True

    log_interval: int = 10
    """Iterations between two log lines."""
    log_throughput: bool = True
    """Samples per second in the log line."""
    tensorboard_dir: str | None = None
    """Folder for TensorBoard; without it nothing is written."""
    model_summary: bool = False
    """Print a table of the model's layers with what they give, parameters, operations and where each lives, and end
    without training. A run always writes it to model_summary.md beside config.json, and to TensorBoard."""
    profile_pipeline: bool = False
    """At each log line, measure when every rank did what in the step before it, and set it beside the simulation:
    bubble in the log, charts in TensorBoard."""
    log_pictures_interval: int | None = None
    """Iterations between two pictures of spikes in TensorBoard, which also shows the first samples; by default 10 times
    --log-interval, 0 draws nothing."""
    eval_interval: int | None = None
    """Iterations between two evaluations; by default only one at the end."""
    eval_iters: int | None = None
    """Global batches per evaluation; by default all of the validation data, 0 never evaluates."""

    @property
    def picture_interval(self) -> int:
        """Iterations between two pictures; 0 where there are none."""
        if self.tensorboard_dir is None:
            return 0
        return 10 * self.log_interval if self.log_pictures_interval is None else self.log_pictures_interval

    def problems(self) -> list[str]:
        wrong = at_least(self, 1, "log_interval")
        wrong += [
            f"{problem}; leave it out to evaluate only at the end, --eval-iters 0 never evaluates"
            for problem in at_least(self, 1, "eval_interval")
        ]
        wrong += at_least(self, 0, "eval_iters", "log_pictures_interval")
        wrong += needs(self, "tensorboard_dir", "log_pictures_interval")
        if self.eval_iters == 0 and self.eval_interval is not None:
            wrong.append(f"--eval-interval {self.eval_interval} has no meaning with --eval-iters 0")
        return wrong
