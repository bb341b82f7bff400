"""What a run reports, and how often it evaluates."""

from __future__ import annotations

import re

from pydantic.dataclasses import dataclass

from megasnn.config.checks import refusal
from megasnn.config.fields import Count, Size
from megasnn.files import STRICT

PICTURE_LINES = 10
"""Log lines between two pictures of spikes."""


@dataclass(frozen=True, config=STRICT)
class LoggingConfig:
    """One rank writes all logs."""

    log_interval: Size = 10
    """Iterations between two log lines. With --tensorboard-dir, spikes are drawn at every tenth of them."""
    tensorboard_dir: str | None = None
    """Folder for TensorBoard; without it nothing is written."""
    model_summary: bool = False
    """Print a table of the model's layers with what they give, parameters, operations and where each lives, and end
    without training. A run always writes it to model_summary.md beside config.json, and to TensorBoard."""
    profile_pipeline: bool = False
    """At each log line, measure when every rank did what in the step before it, and set it beside the simulation:
    bubble in the log, charts in TensorBoard."""
    profile_steps: str | None = None
    """Iterations "10-12" of which torch.profiler writes a trace for each rank of the first replica, with actions,
    layers and messages by name, into the folder traces beside the event files or checkpoints."""
    eval_interval: Size | None = None
    """Iterations between two evaluations; by default only one at the end."""
    eval_iters: Count | None = None
    """Global batches per evaluation; by default all of the validation data, 0 never evaluates."""

    @property
    def picture_interval(self) -> int:
        """Iterations between two pictures; 0 where there are none."""
        return 0 if self.tensorboard_dir is None else PICTURE_LINES * self.log_interval

    @property
    def profiled_steps(self) -> range:
        """The iterations of `profile_steps`. Raises ValueError for what is none."""
        if self.profile_steps is None:
            return range(0)
        found = re.fullmatch(r"(\d{1,15})(?:-(\d{1,15}))?", self.profile_steps.strip())
        first, last = (int(found[1]), int(found[2] or found[1])) if found else (0, 0)
        if not 1 <= first <= last:
            raise ValueError(
                f"--profile-steps {self.profile_steps}: give iterations as 10-12, or one of them, from 1 on"
            )
        return range(first, last + 1)

    def problems(self) -> list[str]:
        """What contradicts itself, with values and flags."""
        wrong = refusal(lambda: self.profiled_steps)
        if self.eval_iters == 0 and self.eval_interval is not None:
            wrong.append(f"--eval-interval {self.eval_interval} has no meaning with --eval-iters 0")
        return wrong
