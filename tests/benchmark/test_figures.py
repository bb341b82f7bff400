"""From clocks to figures, on made-up measurements."""

from __future__ import annotations

import pytest

from tools.benchmark.layouts import brief, table_of
from tools.benchmark.layouts_figures import Measurements, Memory, Preparation, Turn, figures, step_times
from tools.benchmark.layouts_flags import LayoutBenchmark
from tools.benchmark.log import append_lines, latest_alike, plain, read_lines
from tools.benchmark.table import change

TRAFFIC = {"data": {"calls": 3, "mb": 1.5, "dense_mb": 1.5}, "world": {"calls": 1, "mb": 0.25, "dense_mb": 0.25}}


def turn(*clock: float) -> Turn:
    steps = len(clock) - 1
    return Turn(list(clock), [0.008] * steps, [0.002] * steps)


def test_a_step_lasts_until_its_last_rank_has_finished() -> None:
    assert step_times([turn(1.0, 2.0, 4.0), turn(1.5, 3.0, 3.5)]) == [1.5, 1.0]


def measured() -> dict:
    config = LayoutBenchmark(rows=("spikingjelly", "megasnn", "dp2"), global_batch_size=8)
    sj, one, dp2 = config.table_rows()
    # The machine is half as fast in the second round.
    alone = Preparation("", 2.3, {})
    return {
        sj: Measurements([alone], [[turn(0, 3, 6)], [turn(0, 6, 12)]], [Memory(200, 1200, None)]),
        one: Measurements([alone], [[turn(0, 2, 4)], [turn(0, 4, 8)]], [Memory(200, 700, 400)]),
        dp2: Measurements(
            [Preparation("", 2.3, TRAFFIC), Preparation("", 2.3, {})],
            [[turn(0, 1, 2), turn(0, 1, 2)], [turn(0, 2, 4), turn(0, 2, 4)]],
            [Memory(200, 450, 220), Memory(210, 450, 210)],
        ),
    }


def test_ratios_are_taken_round_by_round() -> None:
    sj, one, dp2 = figures(LayoutBenchmark(global_batch_size=8), measured())
    assert one["throughput_ratio"]["spikingjelly"] == pytest.approx(dict(median=1.5, q1=1.5, q3=1.5, min=1.5, max=1.5))
    assert dp2["throughput_ratio"]["megasnn"]["max"] == pytest.approx(2)
    assert dp2["memory_ratio"] == {"megasnn": 0.5, "spikingjelly": 0.25}
    assert [line["activations_ratio"] for line in (sj, one, dp2)] == [None, 1, 0.55]
    assert sj["step_ms"] == pytest.approx(dict(median=4500, q1=3000, q3=6000, min=3000, max=6000))
    assert dp2["samples_per_s"] == pytest.approx(8 / 1.5)
    assert dp2["samples_per_s_per_rank"] == pytest.approx(4 / 1.5)


def test_a_line_holds_the_regime_the_parts_of_a_step_and_what_should_not_happen() -> None:
    data = measured()
    for row, one in data.items():
        for turn_of_rank in (rank for ranks in one.turns for rank in ranks):
            turn_of_rank.parts_ms.update({"forward": [2.0, 4.0], "backward": [5.0, 5.0]})
        one.events += [{"warnings": 1, "recompiles": 0, "graph_breaks": 2}] * row.ranks
    _, one, dp2 = figures(LayoutBenchmark(regime="weak", global_batch_size=8), data)
    assert (dp2["regime"], dp2["samples"], dp2["samples_per_rank"], dp2["replicas"]) == ("weak", 16, 8, 2)
    assert dp2["phases_ms"] == {
        "forward_backward": pytest.approx(8), "forward": 3, "backward": 5, "reset": None, "optimizer": pytest.approx(2),
    }  # fmt: skip
    assert (dp2["phases_spread_ms"]["forward"]["min"], dp2["phases_spread_ms"]["forward"]["max"]) == (2, 4)
    assert (dp2["warnings"], dp2["recompiles"], dp2["graph_breaks"], one["warnings"]) == (2, 0, 4, 1)
    assert dp2["tensor_parallel"] == {"calls": 0, "mb": 0} and dp2["setup_ms"] == {"plan": None, "materialise": None}


def test_weak_scaling_counts_samples_not_steps() -> None:
    _, _, dp2 = figures(LayoutBenchmark(regime="weak", global_batch_size=8), measured())
    assert dp2["throughput_ratio"]["megasnn"]["median"] == pytest.approx(4)


def test_the_table_shows_the_change_since_the_latest_line_alike(tmp_path) -> None:
    log = tmp_path / "benchmark.jsonl"
    lines = [{**line, "machine": {"cpu": "a"}} for line in figures(LayoutBenchmark(global_batch_size=8), measured())]
    older = [{**line, "step_ms": {"median": 10 * line["step_ms"]["median"]}} for line in lines]
    slower = [{**line, "step_ms": {"median": 2 * line["step_ms"]["median"]}} for line in lines]
    elsewhere = [{**line, "machine": {"cpu": "b"}} for line in lines]
    assert latest_alike(lines[0], read_lines(log)) is None
    append_lines(log, older + slower)
    append_lines(log, elsewhere)
    last = [latest_alike(line, read_lines(log)) for line in lines]
    text = table_of(lines, last)
    assert text.count("-50.0%") == 3 and text.count("+0.0%") == 3
    row = next(line for line in text.splitlines() if line.startswith("dp2"))
    assert row.split()[:4] == ["dp2", "2", "x", "1"] and row.split()[11:15] == ["220", "0.550", "4", "1.75"]
    assert table_of(lines, [None] * 3).count("%") == 0


def test_a_line_is_compared_with_what_the_log_gives_back(tmp_path) -> None:
    line = plain({"configuration": {"models": ("vgg_dvs",), "output": tmp_path}, "step_ms": 2.0})
    append_lines(tmp_path / "benchmark.jsonl", [line])
    last = latest_alike({**line, "step_ms": 3.0}, read_lines(tmp_path / "benchmark.jsonl"))
    assert last == line and change({**line, "step_ms": 3.0}, last, "step_ms") == "+50.0%"
    assert change(line, {**line, "step_ms": 0.0}, "step_ms") == change(line, {}, "step_ms") == "-"


def test_the_summary_compares_one_rank_with_spikingjelly_and_layouts_with_one_rank() -> None:
    said = brief(figures(LayoutBenchmark(global_batch_size=8), measured())).splitlines()
    assert [line.split(" (")[0] for line in said] == [
        "one rank: 1.50 x the throughput of SpikingJelly in one process",
        "dp2: 2.00 x the throughput of one rank",
    ]


def test_a_broken_log_is_refused_before_anything_is_measured(tmp_path) -> None:
    log = tmp_path / "benchmark.jsonl"
    log.write_text('{"row": "dp2"}\nnot json\n')
    with pytest.raises(ValueError, match="line 2, is not JSON.*--output"):
        read_lines(log)
