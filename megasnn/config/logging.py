"""Reports of a run, and how often it evaluates."""

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
    """Iterations between two log lines; spikes are drawn at every tenth of them."""
    tensorboard_dir: str | None = None
    """Folder for TensorBoard; without it nothing is written."""
    profile_steps: str | None = None
    """Iterations, "10-12", of which torch.profiler writes a trace for each rank of the first replica."""
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
        """Iterations of `profile_steps`. Raises ValueError for what is none."""
        if self.profile_steps is None:
            return range(0)
        found = re.fullmatch(r"(\d{1,15})(?:-(\d{1,15}))?", self.profile_steps.strip())
        first, last = (int(found[1]), int(found[2] or found[1])) if found else (0, 0)
        if not 1 <= first <= last:
            raise ValueError(f"--profile-steps {self.profile_steps}: give iterations from 1 on, as 10-12 or 10")
        return range(first, last + 1)

    def problems(self) -> list[str]:
        """Contradictions, with values and flags."""
        return refusal(lambda: self.profiled_steps)
