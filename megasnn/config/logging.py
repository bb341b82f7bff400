"""Reports of a run, and how often it evaluates."""

from __future__ import annotations

from pydantic.dataclasses import dataclass

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
    profile_step: Size | None = None
    """Iteration of which torch.profiler writes a trace for each rank of the first replica."""
    eval_interval: Size | None = None
    """Iterations between two evaluations; by default only one at the end."""
    eval_iters: Count | None = None
    """Global batches per evaluation; by default all of the validation data, 0 never evaluates."""

    @property
    def picture_interval(self) -> int:
        """Iterations between two pictures; 0 where there are none."""
        return 0 if self.tensorboard_dir is None else PICTURE_LINES * self.log_interval
