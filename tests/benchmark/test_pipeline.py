"""The benchmark of schedules: figures from made-up measurements, and the program on a small step."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megasnn.config.checks import ConfigError
from tools.benchmark.pipeline import figures, table_of
from tools.benchmark.pipeline_flags import Measured, PipelineBenchmark, PipelineTurn
from tools.benchmark.program import main

FACTS = {"schedule": "1f1b", "layout": "5|9", "forward_bytes_ratio": None}


def turn(step: float, schedule: float, *peaks: float) -> list[PipelineTurn]:
    return [PipelineTurn([step, step], [schedule, schedule], peak) for peak in peaks]


def test_ratios_are_taken_round_by_round() -> None:
    """The machine is half as fast in the second round; its costs, measured again, say so too."""
    config = PipelineBenchmark(rounds=2, schedules=("zbv",))
    staged = {**FACTS, "schedule": "zbv", "forward_bytes_ratio": 0.03125, "bubble": 0.05, "peak_mb": [20.0, 10.0]}
    measured = {
        "one batch": Measured([FACTS], [turn(4.0, 3.9, 200), turn(8.0, 7.9, 200)]),
        "one rank": Measured([FACTS], [turn(3.6, 3.5, 50), turn(7.2, 7.0, 50)]),
        "zbv": Measured([staged] * 2, [turn(2.0, 1.9, 30, 25), turn(4.0, 3.8, 30, 35)], [1.8, 3.6]),
    }
    *_, zbv = lines = figures(config, "vgg_dvs", measured)
    assert zbv["ratio_to_simulated"]["median"] == pytest.approx(1.9 / 1.8)
    assert zbv["throughput_ratio"]["one rank"]["min"] == zbv["throughput_ratio"]["one rank"]["max"] == 1.8
    assert zbv["peak_mb"] == [30, 35] and zbv["simulated_ms"]["max"] == 3600
    row = table_of(lines, [None] * 3).splitlines()[-1].split()
    assert row == "zbv zbv 5|9 3000.0 2850.0 2700.0 1.056 5.0% 1.80 2.00 30|35 20|10 1/32.0 -".split()


def test_what_cannot_be_run_is_refused() -> None:
    with pytest.raises(ConfigError) as error:
        PipelineBenchmark(schedules=("zigzag",), stages=1, rounds=0).check()
    assert all(text in str(error.value) for text in ("'zigzag' is none", "--stages must be", "--rounds must be"))


@pytest.mark.slow
@pytest.mark.usefixtures("forked_ranks")
def test_the_program(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    small = "--models spikformer_ti --micro-batches 2 --micro-batch-size 1 --rounds 1 --schedules zbv".split()
    assert main(["--pipeline", *small, "--output", str(tmp_path / "log.jsonl")]) == 0
    lines = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert [line["row"].removeprefix("pipeline ") for line in lines] == ["one batch", "one rank", "zbv"]
    for line in lines[2:]:
        assert 0 < line["forward_bytes_ratio"] <= 1 / 3.9
        assert line["ratio_to_simulated"]["median"] > 0.2 and len(line["simulated_peak_mb"]) == 2
        assert line["step_ms"]["median"] >= line["schedule_ms"]["median"] > 0
    assert "measured/" in capfd.readouterr().out
