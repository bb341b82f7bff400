from collections import defaultdict
from pathlib import Path
from xml.etree import ElementTree

import pytest

from megasnn.commands.draw_schedule import main
from megasnn.schedule import ChunkCost, equal_costs, generate, simulate
from megasnn.schedule.gantt import SECONDS, View, draw_grid, svg, write_chart


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


def test_a_chart_has_a_bar_for_every_computation(tmp_path: Path) -> None:
    main(["v-half", "--stages", "2", "--micro-batches", "3", "--output", str(tmp_path / "g.svg")])
    titles = [element.text for element in ElementTree.parse(tmp_path / "g.svg").iter() if element.tag.endswith("title")]
    assert sorted(map(str, titles)) == sorted(f"{c}{k}{m}" for c in range(4) for k in "FIW" for m in range(3))


def test_a_chart_says_what_its_axis_and_colours_are(tmp_path: Path) -> None:
    main(["zbv", "--stages", "2", "--micro-batches", "3", "--output", str(tmp_path / "g.svg")])
    texts = [element.text for element in ElementTree.parse(tmp_path / "g.svg").iter() if element.tag.endswith("text")]
    assert {"waiting", "forward", "input gradient", "weight gradient", "rank 0", "0", "2", "4", "time"} <= set(texts)
    assert "backward" not in texts, "there is none"
    assert any(text is not None and "makespan" in text and "units of time" in text for text in texts)


def test_a_chart_of_seconds_is_in_milliseconds() -> None:
    schedule = generate("1f1b", 2, 2)
    result = simulate(schedule, [ChunkCost(0.001, 0.002)] * 2)
    text = svg(schedule, result, View(0.02, *SECONDS, "measured"))
    assert "measured: 1f1b" in text and "makespan 9 ms" in text and ">ms</text>" in text
    assert ">20</text>" in text, "the axis ends with what the width stands for"


def test_gathered_weights_have_lanes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One below a rank's computations for each unit that is there at the same time, and one for gradients."""
    flags = "--stages 1 --micro-batches 2 --units 3 --live-units 2 --gather 0.3 --recompute always --scatter 0.3"
    main(["1f1b", *flags.split(), "--output", str(tmp_path / "g.svg")])
    assert "gathers 6" in capsys.readouterr().out
    tree = ElementTree.parse(tmp_path / "g.svg")
    lanes = defaultdict(list)
    for group in tree.iter("{http://www.w3.org/2000/svg}g"):
        title, box = group
        if any(kind in str(title.text) for kind in ("GATHER", "FREE", "SCATTER")):
            lanes[float(box.attrib["y"])].append(str(title.text))
    first, second, gradients = (lanes[top] for top in sorted(lanes))
    assert first == "0GATHER 0FREE 2GATHER 2FREE 0GATHER 0FREE 2GATHER 2FREE 0GATHER 0FREE".split()
    assert second == ["1GATHER", "1FREE"]
    assert gradients == "2SCATTER0 1SCATTER0 0SCATTER0 2SCATTER1 1SCATTER1 0SCATTER1".split()
    texts = {element.text for element in tree.iter() if element.tag.endswith("text")}
    assert {"gathering weights", "gathered", "scattering"} <= texts


def test_a_picture_can_be_opened(tmp_path: Path) -> None:
    from PIL import Image

    schedule = generate("1f1b", 2, 2)
    write_chart(schedule, simulate(schedule, equal_costs(2)(schedule.placement)), tmp_path / "g.png")
    with Image.open(tmp_path / "g.png") as image:
        assert image.width > 1000
        assert len(image.getcolors(maxcolors=1 << 20) or []) > 3


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        ("--output g.gif", "--output g.gif: the name must end in .svg or .png"),
        ("--output nowhere/g.svg", "--output nowhere/g.svg: there is no folder nowhere"),
        ("--forward nan", "finite and not negative, got nan 1 1 0 0 0"),
        ("--weight-grad inf", "finite and not negative, got 1 1 inf 0 0 0"),
        ("--transfer -1", "finite and not negative, got 1 1 1 -1 0 0"),
        ("--live-units 2 --gather -2", "finite and not negative, got 1 1 1 0 -2 0"),
        ("--live-units 2 --scatter inf", "finite and not negative, got 1 1 1 0 0 inf"),
        ("--live-units 2 --gathered-ahead -1", "weights are gathered -1 units ahead; it must be 0 or more"),
        ("--live-units -1", "--live-units must not be negative, got -1"),
        ("--gather 1", "--gather is for layers whose weights are gathered: give --live-units, at least 1"),
        ("--gathered-ahead 1", "--gathered-ahead is for layers whose weights are gathered: give --live-units"),
    ],
)
def test_what_cannot_be_drawn_is_refused_before_anything_is_printed(
    capsys: pytest.CaptureFixture[str], flags: str, problem: str
) -> None:
    with pytest.raises(ValueError, match=problem):
        main(["1f1b", *flags.split()])
    assert capsys.readouterr().out == ""
