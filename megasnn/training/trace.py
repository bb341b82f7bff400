"""A trace of some iterations: every operation of a rank, under the names of actions, layers and messages."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from torch.profiler import ProfilerActivity, profile

from megasnn.config import PretrainConfig
from megasnn.parallel_state import ParallelState
from megasnn.telemetry.log import BestEffort
from megasnn.training.startup_log import log_folder


class StepTrace:
    """Takes the trace of --profile-steps on the ranks of the first replica. An error in it ends no run.

    Args:
        done: iterations that an earlier part of the run has made.
        line: takes a line for the log.
    """

    def __init__(
        self, config: PretrainConfig, state: ParallelState, iterations: int, done: int, line: Callable[[str], None]
    ) -> None:
        options = config.logging
        steps = options.profiled_steps
        if steps and not done < steps[-1] <= iterations:
            line(
                f"WARNING: --profile-steps {options.profile_steps}, and the run has iterations {done + 1} to "
                f"{iterations}: the trace has what lies in both"
            )
        self._line, self._best_effort = line, BestEffort(line)
        self._steps = steps if state.data.rank == 0 else range(0)
        self._folder, self._rank = (log_folder(config) or Path()) / "traces", state.rank
        self._activities = [ProfilerActivity.CPU]
        if state.device.type == "cuda":
            self._activities.append(ProfilerActivity.CUDA)
        self._profile: profile | None = None
        self._first = 0

    @contextmanager
    def around(self, number: int) -> Iterator[None]:
        """Traces iteration `number`, where it is one of them, and writes the trace behind the last."""
        if number in self._steps and self._profile is None:
            with self._best_effort("the trace of --profile-steps"):
                self._profile, self._first = profile(activities=self._activities), number
                self._profile.start()
        try:
            yield
        except BaseException:
            if self._profile is not None:
                self._profile.stop()  # the process may go on, in a notebook
                self._profile = None
            raise
        if number in self._steps and number == self._steps[-1]:
            self.close(number)

    def close(self, number: int) -> None:
        """Writes the trace up to iteration `number`, where one is being taken."""
        taken, self._profile = self._profile, None
        if taken is None:
            return
        with self._best_effort("the trace of --profile-steps"):
            taken.stop()
            self._folder.mkdir(parents=True, exist_ok=True)
            path = self._folder / f"rank{self._rank}-{self._first}-{number}.pt.trace.json"
            taken.export_chrome_trace(str(path))
            self._line(f"wrote {path}")
