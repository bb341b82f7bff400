"""The benchmark of what grows with ranks, stages and micro-batches, at small sizes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch.distributed as dist

from megasnn.grid import Grid
from megasnn.parallel_state import model_parallel_is_initialized
from tests.planner.models import MODEL
from tools.benchmark import scale_plans
from tools.benchmark.program import main
from tools.benchmark.scale import grid_of

SMALL = "--ranks 8 --stages 2 4 --micro-batches 3 --units 1 2 --schedules 1f1b zbv --output".split()


def test_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scale_plans, "dimensions_of", lambda model: MODEL)
    log = tmp_path / "log.jsonl"
    assert main(["--scale", *SMALL, str(log)]) == 0
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    grid, replicas, planned, *schedules, executor = lines
    assert [line["row"] for line in schedules] == ["1f1b 2 x 3 x 1", "zbv 2 x 3 x 1", "1f1b 2 x 3 x 2", "zbv 2 x 3 x 2"]
    # Of 8 ranks along three axes of two: four groups along each, twice along the pipeline, and two models.
    assert grid["group_calls"] == 3 * 4 + 4 + 2 and grid["communicators"] == 4
    assert replicas["group_calls"] == 0 and replicas["communicators"] == 1
    assert replicas["pieces"] > grid["pieces"] > 500 and grid["slices"] > 0
    assert planned["layouts"] > 100 and planned["without_reason"] == 0 and 1 < planned["simulated"] <= 20
    assert planned["plan_s"] > 0 and planned["plan"] in (said := capsys.readouterr().out)
    assert "zbv 2 x 3 x 2" in said
    assert all(line["total_s"] > 0 and line["memory_s"] > 0 and line["actions"] > 20 for line in schedules)
    assert executor["actions"] == 3 * 3 * 2 + 2 and executor["per_second"] > 0
    assert not dist.is_initialized() and not model_parallel_is_initialized()


def test_grids() -> None:
    assert grid_of(64) == Grid(pipeline=4, data=4, tensor=4) and grid_of(4096) == Grid(pipeline=64, data=8, tensor=8)


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        (["--ranks", "16"], "--ranks 16 is no power of 8"),
        (["--micro-batches", "0"], "--micro-batches 0 must be at least 1"),
        (["--schedules", "2f2b"], "--schedules 2f2b is none of gpipe"),
    ],
)
def test_flags_without_sense(flags: list[str], problem: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--scale", *flags]) == 2
    assert problem in capsys.readouterr().err
