"""Measured times of the pipeline's actions in a step, beside the simulated ones."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch.distributed as dist
from numpy.typing import NDArray

from megasnn.engine.distributed_model import DistributedModel
from megasnn.parallel.agreement import clock_offsets
from megasnn.parallel_state import ParallelState
from megasnn.pipeline.plan import PipelinePlan
from megasnn.schedule import Action, Schedule, Simulation
from megasnn.schedule.draw import SECONDS, View, raster
from megasnn.schedule.simulate import TimedAction, summarise
from megasnn.telemetry.reporter import Reporter
from megasnn.telemetry.timers import Mark


@dataclass(frozen=True)
class PipelineProfile:
    """A step of the first replica's pipeline, in seconds from its first action on."""

    schedule: Schedule
    measured: Simulation
    predicted: Simulation


class PipelineProfiler:
    """Records single steps: nothing is measured in the others.

    Args:
        plan: with measured costs.
    """

    def __init__(self, distributed: DistributedModel, plan: PipelinePlan, state: ParallelState) -> None:
        self._distributed, self._plan, self._state = distributed, plan, state
        self._marks: list[tuple[Mark, Mark]] = []

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Around one training step."""
        self._marks.clear()
        self._distributed.executor.clock.start()
        self._distributed.executor.observer = self._observe
        try:
            yield
        finally:
            self._distributed.executor.observer = None

    def _observe(self, action: Action, start: Mark, end: Mark) -> None:
        self._marks.append((start, end))

    def profile(self, micro_batches: int) -> PipelineProfile:
        """Of the step recorded last. Collective over each pipeline; each of its ranks gets the same."""
        pipeline = self._state.pipeline
        offsets, seconds = clock_offsets(pipeline), self._distributed.executor.clock.seconds
        mine = [(seconds(start), seconds(end)) for start, end in self._marks]
        times: list[list[tuple[float, float]]] = [[] for _ in range(pipeline.size)]
        if pipeline.size > 1:
            dist.all_gather_object(times, mine, group=pipeline.handle)
        else:
            times = [mine]
        schedule = self._plan.schedules.training(micro_batches)
        # A step that was not finite is followed by forwards that look for the place.
        times = [row[: len(actions)] for row, actions in zip(times, schedule.actions, strict=True)]
        predicted = self._plan.simulation(micro_batches)
        assert predicted is not None, "a profile is asked for before the costs are measured"
        return PipelineProfile(schedule, measured_simulation(schedule, times, offsets), predicted)


def measured_simulation(
    schedule: Schedule, times: Sequence[Sequence[tuple[float, float]]], offsets: Sequence[float]
) -> Simulation:
    """A timeline from start and end of every rank's actions, in order, on the ranks' own clocks.

    Args:
        offsets: what to add to each rank's clock.
    """
    origin = min((row[0][0] + offset for row, offset in zip(times, offsets, strict=True) if row), default=0.0)
    timeline = [
        [
            TimedAction(action, start + offset - origin, end + offset - origin)
            for action, (start, end) in zip(actions, row, strict=True)
        ]
        for actions, row, offset in zip(schedule.actions, times, offsets, strict=True)
    ]
    return summarise(schedule, timeline)


def scalars_of(profile: PipelineProfile) -> dict[str, float]:
    """For TensorBoard: time and bubble share of the schedule, measured and predicted."""
    return {
        f"pipeline/{name}_{what}": value
        for what, result in (("measured", profile.measured), ("predicted", profile.predicted))
        for name, value in (("ms", 1e3 * result.makespan), ("bubble", result.idle_share))
    }


def chart(schedule: Schedule, result: Simulation, title: str, span: float | None = None) -> NDArray[np.uint8]:
    """The Gantt chart of times in seconds, uint8 `[height, width, 3]`.

    Args:
        span: seconds that the whole width stands for, to compare charts; the makespan when not given.
    """
    return raster(schedule, result, View(span, *SECONDS, title))


def report(profile: PipelineProfile, reporter: Reporter, iteration: int, samples: int) -> None:
    """The log line, the scalars, and the two charts on one scale.

    Args:
        samples: consumed up to this iteration.
    """
    values = scalars_of(profile)
    reporter.scalars(values, iteration, samples)
    reporter.line(
        f"pipeline at iteration {iteration}, {profile.schedule.name}: "
        + ", ".join(
            f"{what} {values[f'pipeline/ms_{what}']:.1f} ms with a bubble of {values[f'pipeline/bubble_{what}']:.1%}"
            for what in ("measured", "predicted")
        )
    )
    span = max(profile.measured.makespan, profile.predicted.makespan)
    for what, result in (("measured", profile.measured), ("predicted", profile.predicted)):
        draw = partial(chart, profile.schedule, result, what, span)
        reporter.picture(f"pipeline/{what}", draw, iteration)
