"""A trace of some iterations: every operation of a rank, under the names of actions, layers and messages."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch.profiler import ProfilerActivity, profile

from megasnn.config import PretrainConfig
from megasnn.parallel_state import ParallelState
from megasnn.telemetry.tried import Tried
from megasnn.training.introduction import log_folder


class StepTrace:
    """Takes the trace of --profile-steps, on the ranks of the first replica. What fails here ends no run.

    Close it: where the run ends before the last of the steps, the trace has those that there were.

    Args:
        done: iterations that an earlier part of the run has made.
        line: takes a line for the log.
    """

    def __init__(
        self, config: PretrainConfig, state: ParallelState, iterations: int, done: int, line: Callable[[str], None]
    ) -> None:
        options = config.logging
        steps = options.profiled_steps
        self._line = line if state.rank == 0 else _to_stderr(state.rank)
        self._tried, self._device = Tried(self._line), state.device
        if steps and not done < steps[-1] <= iterations:
            line(
                f"WARNING: --profile-steps {options.profile_steps}, and the run has iterations {done + 1} to "
                f"{iterations}: the trace has what lies in both, and is not written where nothing does"
            )
        self._steps = steps if state.data.rank == 0 else range(0)
        self._folder = (log_folder(config) or Path()) / "traces"
        self._rank = state.rank
        self._profile: profile | None = None
        self._first = 0

    @contextmanager
    def around(self, number: int) -> Iterator[None]:
        """Around iteration `number`."""
        if number in self._steps and self._profile is None:
            with self._tried("the trace of --profile-steps"):
                self._begin(number)
        try:
            yield
        except BaseException:
            # The process may go on, in a notebook. Writing would keep the error waiting.
            self._end(number, writes=False)
            raise
        if number in self._steps and number == self._steps[-1]:
            self._end(number)

    def close(self, number: int) -> None:
        """After the last iteration."""
        self._end(number)

    def _begin(self, number: int) -> None:
        activities = [ProfilerActivity.CPU]
        if self._device.type == "cuda":
            activities.append(ProfilerActivity.CUDA)
        taken = profile(activities=activities)
        taken.start()
        self._profile, self._first = taken, number

    def _end(self, number: int, writes: bool = True) -> None:
        taken, self._profile = self._profile, None
        if taken is None:
            return
        with self._tried("the trace of --profile-steps"):
            taken.stop()
            if writes:
                self._write(f"rank{self._rank}-{self._first}-{number}.pt.trace.json", taken.export_chrome_trace)

    def _write(self, name: str, write: Callable[[str], Any]) -> None:
        """A file that is whole or not there."""
        self._folder.mkdir(parents=True, exist_ok=True)
        path, partial = self._folder / name, self._folder / f".partial-{name}"
        try:
            write(str(partial))
            os.replace(partial, path)
        finally:
            partial.unlink(missing_ok=True)
        self._line(f"wrote {path}")


def _to_stderr(rank: int) -> Callable[[str], None]:
    return lambda text: print(f"[rank {rank}] {text}", file=sys.stderr, flush=True)
