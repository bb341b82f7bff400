from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from matplotlib.collections import PolyCollection

from megasnn.commands.draw_schedule import main
from megasnn.schedule import ChunkCost, equal_costs, generate, simulate
from megasnn.schedule.actions import COMPUTE
from megasnn.schedule.draw import SECONDS, View, chart, draw_grid, raster, write_chart


def test_the_grid_in_the_terminal() -> None:
    schedule = generate("zb1p", 2, 2)
    result = simulate(schedule, equal_costs(2)(schedule.placement))
    assert draw_grid(schedule, result).splitlines() == [
        "rank 0 |F0 F1 ...I0 W0 I1 W1 |",
        "rank 1 |...F0 I0 F1 I1 W0 W1 |",
    ]


def test_the_tool_prints_what_the_simulation_says(capsys: pytest.CaptureFixture[str]) -> None:
    main(["zbv", "--stages", "4", "--micro-batches", "8"])
    printed = capsys.readouterr().out
    assert "makespan 25.5\n" in printed
    assert printed.count("between first and last action 0), peak activations 4,") == 4


def test_a_chart_has_a_bar_for_every_computation_and_says_what_it_shows() -> None:
    schedule = generate("v-half", 2, 3)
    figure = chart(schedule, simulate(schedule, [ChunkCost(0.001, 0.002)] * 4), View(0.02, *SECONDS, "measured"))
    (axes,) = figure.axes
    bars = sum(len(each.get_paths()) for each in axes.collections if isinstance(each, PolyCollection))
    assert bars == 2 + sum(action.kind in COMPUTE for row in schedule.actions for action in row)
    assert axes.get_xlabel() == "ms" and axes.get_xlim() == (0, 20)
    assert "measured: v-half" in axes.get_title(loc="left")
    (legend,) = figure.legends
    texts = {text.get_text() for text in legend.get_texts()}
    assert {"waiting", "forward", "input gradient", "weight gradient"} <= texts and "backward" not in texts


def test_files_and_pictures(tmp_path: Path) -> None:
    schedule = generate("1f1b", 2, 2)
    result = simulate(schedule, equal_costs(2)(schedule.placement))
    for name in ("a.svg", "b.svg", "c.png"):
        write_chart(schedule, result, tmp_path / name)
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes(), "the same in every run"
    assert (tmp_path / "c.png").read_bytes().startswith(b"\x89PNG")
    picture = raster(schedule, result)
    assert picture.dtype == np.uint8 and picture.shape[1] > 1000 and len(np.unique(picture.reshape(-1, 3), axis=0)) > 3


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        ("--output g.gif", "--output g.gif"),
        ("--output nowhere/g.svg", "--output nowhere/g.svg"),
        ("--forward nan", "nan 1 1 0 0 0"),
        ("--transfer -1", "1 1 1 -1 0 0"),
        ("--live-units 2 --scatter inf", "1 1 1 0 0 inf"),
        ("--live-units 2 --gathered-ahead -1", "-1 units ahead"),
        ("--live-units -1", "--live-units .* -1"),
        ("--gather 1", "--gather .* --live-units"),
    ],
)
def test_what_cannot_be_drawn_is_refused_before_anything_is_printed(
    capsys: pytest.CaptureFixture[str], flags: str, named: str
) -> None:
    with pytest.raises(ValueError, match=named):
        main(["1f1b", *flags.split()])
    assert capsys.readouterr().out == ""
