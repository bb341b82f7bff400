"""Profiles of the pipeline: what was measured beside what was predicted, in the log and in TensorBoard."""

from __future__ import annotations

from unittest import mock

import numpy as np
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from megasnn.parallel import agreement
from megasnn.parallel_state import destroy_model_parallel, initialize_model_parallel
from megasnn.schedule import equal_costs, generate, simulate
from megasnn.training.profiling import measured_simulation
from tests.training.runs import train

PP2 = ("--pipeline-model-parallel-size", "2", "--train-iters", "4", "--log-interval", "2", "--eval-iters", "0")


@pytest.mark.parametrize("schedule", ["zbv", "1f1b"])
def test_a_profiled_run_shows_both_charts(ranks, tmp_path_factory, tmp_path, schedule) -> None:
    cache = str(tmp_path_factory.mktemp("cache"))
    flags = (*PP2, "--pipeline-schedule", schedule, "--profile-steps", "3-4", "--tensorboard-dir", str(tmp_path))
    ranks(2, train, cache, *flags)
    events = EventAccumulator(str(tmp_path)).Reload()
    assert [image.step for image in events.Images("pipeline/simulated")] == [0], "at the start"
    for what in ("measured", "predicted"):
        images = events.Images(f"pipeline/{what}")
        assert [image.step for image in images] == [2]  # the step before those that are traced
        assert images[0].width > 1000
        shares = [event.value for event in events.Scalars(f"6_pipeline/bubble_{what}")]
        assert len(shares) == 1 and all(0 < share < 1 for share in shares)
        assert all(event.value > 0 for event in events.Scalars(f"6_pipeline/ms_{what}"))


def test_measured_times_become_a_timeline_on_one_clock() -> None:
    """What the simulator says, told by ranks whose clocks are apart, comes out as the simulator said it."""
    schedule = generate("1f1b", 3, 5)
    told = simulate(schedule, equal_costs(3)(schedule.placement))
    ahead = [0.0, 7.0, -2.5]
    times = [
        [(t.start + late + 100, t.end + late + 100) for t in row]
        for row, late in zip(told.timeline, ahead, strict=True)
    ]
    measured = measured_simulation(schedule, times, [-late for late in ahead])
    assert measured.makespan == pytest.approx(told.makespan)
    assert measured.idle == pytest.approx(told.idle) and measured.bubble == pytest.approx(told.bubble)
    assert measured.peak_activations == told.peak_activations


def _offsets() -> list[float]:
    """As if the second rank's clock were five seconds behind."""
    state = initialize_model_parallel(pp=2)
    now, behind = agreement.time.perf_counter, 5 if state.rank else 0
    try:
        with mock.patch.object(agreement.time, "perf_counter", lambda: now() - behind):
            return agreement.clock_offsets(state.pp)
    finally:
        destroy_model_parallel()


def test_clocks_of_other_hosts_are_compared(ranks) -> None:
    first, second = ranks(2, _offsets)
    assert first == second and first[0] == 0
    assert np.isclose(first[1], 5, atol=0.2)
