"""What a run reports, and how often it evaluates."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import ClassVar

from megasnn.config.checks import at_least, needs, refusal


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
    profile_steps: str | None = None
    """Iterations "10-12" of which torch.profiler writes a trace, with actions, layers and messages by name, into the
    folder traces beside the event files or checkpoints."""
    profile_ranks: str = "0"
    """Ranks that --profile-steps is for: "0,3", or "all"."""
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

    def profiles_rank(self, rank: int) -> bool:
        """Whether --profile-steps is for this rank."""
        return self.profile_ranks == "all" or rank in self.ranks_to_profile()

    def ranks_to_profile(self) -> list[int]:
        """Those of `profile_ranks`; none for "all". Raises ValueError for what are none."""
        if self.profile_ranks == "all":
            return []
        parts = self.profile_ranks.split(",")
        if not all(re.fullmatch(r"\s*\d{1,9}\s*", part) for part in parts):
            raise ValueError(f"--profile-ranks {self.profile_ranks}: give ranks as 0,3, or all")
        return [int(part) for part in parts]

    def problems(self) -> list[str]:
        wrong = at_least(self, 1, "log_interval")
        wrong += [
            f"{problem}; leave it out to evaluate only at the end, --eval-iters 0 never evaluates"
            for problem in at_least(self, 1, "eval_interval")
        ]
        wrong += at_least(self, 0, "eval_iters", "log_pictures_interval")
        wrong += needs(self, "tensorboard_dir", "log_pictures_interval")
        wrong += refusal(lambda: self.profiled_steps) + refusal(self.ranks_to_profile)
        if self.profile_ranks != "0" and self.profile_steps is None:
            wrong.append(f"--profile-ranks {self.profile_ranks} needs --profile-steps")
        if self.eval_iters == 0 and self.eval_interval is not None:
            wrong.append(f"--eval-interval {self.eval_interval} has no meaning with --eval-iters 0")
        return wrong
