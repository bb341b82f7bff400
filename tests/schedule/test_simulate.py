"""Times of a simulation by hand, and its picture."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from matplotlib.collections import PolyCollection

from megasnn.commands.draw_schedule import main
from megasnn.schedule import ChunkCost, equal_costs, generate, simulate
from megasnn.schedule.actions import COMPUTE, RECEIVES
from megasnn.schedule.draw import chart, raster


def test_a_transfer_delays_the_receiver_only() -> None:
    result = simulate(generate("gpipe", 2, 1), [ChunkCost(1, 1, 1, 10, 10), ChunkCost(1, 1, 1)])
    # F 0-1, transfer 1-11, F 11-12, B 12-14, transfer 14-24, B 24-26.
    assert result.makespan == 26
    assert [(str(t.action), t.start, t.end) for t in result.timeline[0]] == [
        ("0F0", 0, 1),
        ("0SEND_F0", 1, 1),
        ("0RECV_B0", 1, 24),
        ("0B0", 24, 26),
        ("0REDUCE_GRAD", 26, 26),
    ]


def test_messages_travel_at_the_same_time_whatever_their_ranks_compute() -> None:
    """They are sent at 1, 2 and 3, and take 5; back they take 2 from the ends of backwards on."""
    schedule = generate("gpipe", 2, 3)
    result = simulate(schedule, [ChunkCost(1, 1, 1, 5, 2), ChunkCost(1, 1, 1)])
    arrivals = [[t.end for t in row if t.action.kind in RECEIVES] for row in result.timeline]
    assert arrivals == [[13, 15, 17], [6, 7, 8]]
    assert result.makespan == 19 and result.busy == (9, 9)


def test_costs_say_what_activations_count_and_must_fit() -> None:
    result = simulate(generate("gpipe", 2, 3), [ChunkCost(1, 1, 1, activation=0.5), ChunkCost(1, 1, 1, activation=2)])
    assert result.peak_activations == (1.5, 6)
    with pytest.raises(ValueError, match="2 costs for 1"):
        simulate(generate("1f1b", 1, 1), [ChunkCost(1, 1, 1)] * 2)


def test_the_tool_prints_what_the_simulation_says(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["zbv", "--stages", "4", "--micro-batches", "8"]) == 0
    printed = capsys.readouterr().out
    assert "makespan 25.5\n" in printed
    assert printed.count("between first and last action 0), peak activations 4,") == 4


def test_a_chart_has_a_bar_for_every_computation_and_says_what_it_shows() -> None:
    schedule = generate("v-half", 2, 3)
    result = simulate(schedule, [ChunkCost(0.001, 0.001, 0.001)] * 4)
    figure = chart(schedule, result, "simulated", 1e3, "ms")
    (axes,) = figure.axes
    bars = sum(len(each.get_paths()) for each in axes.collections if isinstance(each, PolyCollection))
    assert bars == 2 + sum(action.kind in COMPUTE for row in schedule.actions for action in row)
    assert axes.get_xlabel() == "ms" and axes.get_xlim()[1] == pytest.approx(1e3 * result.makespan)
    assert "simulated: v-half" in axes.get_title(loc="left")
    (legend,) = figure.legends
    texts = {text.get_text() for text in legend.get_texts()}
    assert {"waiting", "forward", "input gradient", "weight gradient"} <= texts and "backward" not in texts


def test_files_and_pictures(tmp_path: Path) -> None:
    for name in ("a.svg", "b.png"):
        main(["1f1b", "--stages", "2", "--micro-batches", "2", "--output", str(tmp_path / name)])
    assert "<svg" in (tmp_path / "a.svg").read_text()
    assert (tmp_path / "b.png").read_bytes().startswith(b"\x89PNG")
    schedule = generate("1f1b", 2, 2)
    picture = raster(schedule, simulate(schedule, equal_costs(2)(schedule.placement)), "simulated")
    assert picture.dtype == np.uint8 and picture.shape[1] > 1000 and len(np.unique(picture.reshape(-1, 3), axis=0)) > 3


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        ("--output g.doc", "doc"),
        ("--output nowhere/g.svg", "nowhere/g.svg"),
        ("--forward nan", "--forward nan"),
        ("--transfer -1", "--transfer -1"),
        ("--stages 0", "0"),
    ],
)
def test_impossible_charts_are_refused(capsys: pytest.CaptureFixture[str], flags: str, named: str) -> None:
    assert main(["1f1b", *flags.split()]) == 1 and named in capsys.readouterr().err
