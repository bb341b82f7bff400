"""The log of the benchmark: rows beside the latest earlier row of the same configuration."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.benchmark.test_layouts import SHORT, TINY, lines
from tools.benchmark.__main__ import main
from tools.benchmark.harness import summary
from tools.benchmark.history import compare, read_log


def made_row(step_ms: Any, **changes: Any) -> dict[str, Any]:
    about = {"case": "Layouts", "row": "dp2", "cpu": "a", "cores": 2, "versions": {"torch": "2.13"}}
    return {**about, "configuration": {"sizes": [1, 2]}, "step_ms": step_ms, "commit": f"{step_ms}", **changes}


def test_the_latest_earlier_row_of_the_same_configuration_is_compared() -> None:
    earlier = [made_row({"median": each}) for each in (50.0, 40.0)]
    row = made_row(summary([20.0]), configuration={"sizes": (1, 2)})
    compare([row], earlier, "step_ms")
    assert row["x_earlier"] == 0.5 and row["earlier"]["commit"] == earlier[1]["commit"]


@pytest.mark.parametrize(
    "changes",
    [
        {"row": "tp2"},
        {"case": "Schedules"},
        {"configuration": {"sizes": [1, 3]}},
        {"configuration": None},
        {"cpu": "b"},
        {"gpu": "b"},
        {"cores": 4},
        {"versions": {"torch": "2.14"}},
        {"step_ms": None},
    ],
)
def test_another_configuration_is_not_compared(changes: dict[str, Any]) -> None:
    row = made_row(summary([20.0]))
    compare([row], [made_row({"median": 40.0}) | changes], "step_ms")
    assert "x_earlier" not in row


def test_a_log_that_cannot_be_read_is_refused_before_measuring(tmp_path: Path, capsys) -> None:
    log = tmp_path / "log"
    assert read_log(log) == []
    log.write_text('{"row": "dp2"}\n{"row": \n')
    assert main([*TINY, *SHORT, "--output", str(log), "--rows", "megasnn"]) == 2
    printed = capsys.readouterr().err
    assert f"--output {log}: line 2" in printed and "round" not in printed


@pytest.mark.usefixtures("forked_ranks")
def test_a_second_run_prints_its_ratio_to_the_first(tmp_path: Path, capsys) -> None:
    log = tmp_path / "log"
    flags = [*TINY, *SHORT, "--output", str(log), "--rows"]
    assert main([*flags, "tp2"]) == 0
    assert capsys.readouterr().out.splitlines()[4].split()[-1] == "-"
    # Another number of steps measures the same configuration.
    assert main([*flags, "tp2", "spikingjelly", "--steps", "2"]) == 0
    first, second, theirs = lines(log)
    ratio = second["step_ms"]["median"] / first["step_ms"]["median"]
    assert second["x_earlier"] == pytest.approx(ratio) and "x_earlier" not in theirs
    printed = capsys.readouterr().out
    assert printed.splitlines()[4].split()[-1] == f"{ratio:.3f}"
    assert f"now/then compares with the run of {first['time']} at {first['commit']}\n" in printed
    assert second["regime"] == "strong" and second["replicas"] == 1
    assert second["global_batch_size"] == 4 and second["rank_batch_size"] == 2
    assert second["samples_per_s_rank"] == pytest.approx(second["samples_per_s"] / 2)
    assert 0 < second["tp_calls"] <= second["calls"] and 0 < second["tp_mb"] <= second["moved_mb"]
    longest = second["step_ms"]["most"]
    timed = "forward", "backward", "forward_backward", "optimizer"
    assert all(0 < second[f"{part}_ms"]["most"] < longest for part in timed)
    assert theirs["forward_backward_ms"] is None and theirs["tp_calls"] == 0
