"""The benchmark of capacity: its search, and a run on one rank and on two."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tools.benchmark.capacity import largest, layout_of
from tools.benchmark.capacity_flags import CapacityBenchmark
from tools.benchmark.program import main
from tools.benchmark.two_ranks import LAYOUTS


@pytest.mark.parametrize("start", [1, 6, 13, 100])
@pytest.mark.parametrize("limit", [0, 1, 7, 8, 29, 64])
def test_the_largest_is_found_from_any_guess(limit: int, start: int) -> None:
    sizes, tried = range(1, 65), []

    def fits(size: int) -> bool:
        tried.append(size)
        return size <= limit

    assert largest(fits, sizes, start) == limit
    assert len(tried) == len(set(tried)) <= 12
    if start == limit:
        assert len(tried) <= 2  # a right guess costs no more than what shows that it is right
    largest_try = max(tried)
    assert largest_try <= max(start, 2 * limit + 2)  # nothing far beyond what fits


def test_sizes_are_those_that_can_be() -> None:
    assert CapacityBenchmark(most=6).sizes(LAYOUTS["cp2"]) == [2, 4, 6]
    assert CapacityBenchmark(most=6).sizes(LAYOUTS["cp2rows"]) == [1, 2, 3, 4, 5, 6]
    sizes = CapacityBenchmark(grows="image-size", most=40).sizes(LAYOUTS["one"])
    assert sizes and all(size % 4 == 0 for size in sizes)
    grown = CapacityBenchmark(grows="depth", micro_batch_size=3).run(7)
    assert grown.model.depth == 7 and grown.micro_batch_size == 3


def test_a_plan_is_a_row() -> None:
    flags = CapacityBenchmark(model="spikformer_ti", memory=150)
    assert layout_of(flags, "plan-capacity").recompute == "always"


@pytest.mark.slow
@pytest.mark.usefixtures("forked_ranks")
def test_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEGASNN_CACHE", str(tmp_path))
    log = tmp_path / "log.jsonl"
    small = "--model spikformer_ti --micro-batches 2 --memory 100 --most 8 --layouts one dp2-zero1"
    assert main(["--capacity", *small.split(), "--output", str(log)]) == 0
    one, dp2 = map(json.loads, log.read_text().splitlines())
    for line in (one, dp2):
        assert 1 <= line["largest"] and line["counted_mb"] <= 100
        assert line["foreseen_mb"] == pytest.approx(line["counted_mb"], rel=0.06)
        assert line["largest"] == 8 or line["next_counted_mb"] > 100
        assert line["regime"] == "capacity" and line["samples"] == 2 * line["largest"] and line["step_ms"] > 0
    assert one["largest"] < dp2["largest"] and dp2["replicas"] == 2
    assert "spikformer_ti, the largest micro-batch of which tensors take no more than 100 MB" in capsys.readouterr().out


def test_flags_without_sense(capsys: pytest.CaptureFixture[str]) -> None:
    wrong = "--model vgg_dvs --grows depth --memory 1e9 --layouts dp3 --most 0"
    assert main(["--capacity", *wrong.split()]) == 2
    told = capsys.readouterr().err
    assert "--layouts dp3: known are one, " in told and "plan-capacity" in told
    assert "--grows depth: --model vgg_dvs has no blocks" in told and "--most must be at least 1" in told
    assert "--memory 1e+09 for each of 2 ranks: this machine has" in told
    assert main(["--capacity", "--most", "1"]) == 2
    assert "--most 1: there is no micro-batch up to that for cp2; raise it" in capsys.readouterr().err
