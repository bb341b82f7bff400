"""The benchmark of memory, on a small step."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tools.benchmark.memory import MemoryBenchmark
from tools.benchmark.program import main


@pytest.mark.slow
@pytest.mark.usefixtures("forked_ranks")
def test_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEGASNN_CACHE", str(tmp_path))
    small = "--model spikformer_ti --micro-batch-size 1 --micro-batches 2 --rounds 1 --memory-budget 30 --ranks 2"
    assert main(["--memory", *small.split(), "--output", str(tmp_path / "log.jsonl")]) == 0
    lines = {line["row"]: line for line in map(json.loads, (tmp_path / "log.jsonl").read_text().splitlines())}
    names = ["spikingjelly", "spikingjelly memopt", "never", "except-last", "always", "budget 30"]
    assert [*lines] == [*names, "always dp2", "always dp2 sharded"]
    counted = {name: line["counted_mb"] for name, line in lines.items()}
    assert counted["always"] < counted["never"] < counted["spikingjelly memopt"] < counted["spikingjelly"]
    for name in ("never", "except-last", "always", "budget 30"):
        assert lines[name]["predicted_mb"] == pytest.approx(counted[name], rel=0.05)
    assert lines["never"]["time_ratio"]["median"] == 1 and "memopt" in capsys.readouterr().out


def test_flags_without_sense(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--memory", "--rounds", "0", "--memory-budget", "0", "--only", "always", "often"]) == 2
    told = capsys.readouterr().err
    assert "--only: 'often' is no row; there are spikingjelly, spikingjelly memopt, never" in told
    assert [row.name for row in MemoryBenchmark(only=("always",)).rows()] == ["spikingjelly", "never", "always"]
    assert "--rounds must be at least 1" in told and "--memory-budget must be greater than 0" in told
