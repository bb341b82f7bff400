"""The program itself, on a model of a few thousand parameters."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tools.benchmark.program import main

FOLDER = Path(__file__).parents[2] / "tools" / "benchmark"
TINY = "--embed-dim 32 --num-heads 2 --depth 1 --image-size 16 --time-steps 2 --global-batch-size 4".split()
SHORT = "--rounds 2 --steps 2 --warmup 1 --pipeline-schedule 1f1b".split()


@pytest.mark.slow
@pytest.mark.usefixtures("forked_ranks")
def test_a_short_run(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    log = tmp_path / "log" / "benchmark.jsonl"
    rows = ["spikingjelly", "megasnn", "pp2"]
    pipeline = "--micro-batches 2 --pipeline-schedule 1f1b".split()  # auto may choose more chunks, which send more
    arguments = [*TINY, *SHORT, *pipeline, "--output", str(log), "--rows", *rows]
    assert main(arguments) == 0
    told = capfd.readouterr()
    assert "round 2/2" in told.err
    assert [line.split()[0] for line in told.out.splitlines() if " x 1 " in line] == rows

    lines = [json.loads(line) for line in log.read_text().splitlines()]
    assert [line["row"] for line in lines] == rows
    for line in lines:
        assert line["step_ms"]["min"] <= line["step_ms"]["median"] <= line["step_ms"]["max"]
        assert 0 < line["phases_ms"]["optimizer"] and 0 < line["phases_ms"]["forward_backward"]
        assert 0 < line["loss"] < 20
        assert len(line["round_ms"]) == 2 and line["samples"] == 4
        assert line["memory_mb"]["baseline"][0] > 50 and line["memory_mb"]["largest"] < 300
        assert line["machine"]["cores"] and line["versions"]["torch"]
        assert line["regime"] == "strong" and line["samples_per_rank"] == 4 / line["layout"]["ranks"]
        parts = line["phases_ms"]["forward"] + line["phases_ms"]["backward"]
        assert 0 < parts < 1.5 * line["phases_ms"]["forward_backward"]
        assert line["recompiles"] == line["graph_breaks"] == 0 <= line["warnings"]
        assert line["setup_ms"]["materialise"] > 0
    theirs, one, pp2 = lines
    assert theirs["phases_ms"]["reset"] > 0 and one["phases_ms"]["reset"] is theirs["setup_ms"]["plan"] is None
    assert pp2["setup_ms"]["plan"] > 0
    assert theirs["activations_mb"] is None and one["activations_ratio"] == 1
    assert 0 < pp2["activations_mb"] < one["activations_mb"] + 1
    assert one["traffic"] == [{}] and one["throughput_ratio"]["megasnn"]["median"] == 1
    assert pp2["layout"]["ranks"] == 2 and pp2["micro_batch_size"] == 2
    # Each micro-batch: one activation forward, one gradient backward.
    assert pp2["traffic"][0]["pipeline"]["calls"] == pp2["traffic"][1]["backward"]["calls"] == 2
    assert sum(map(int, pp2["pipeline_layout"].split("|"))) == 8


def test_wrong_flags_end_with_2_and_a_message(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["--pipeline-schedule", "2f2b"])
    assert "2f2b" in capsys.readouterr().err
    assert main(["--rows", "tp5"]) == 2
    told = capsys.readouterr().err
    assert "--num-heads 12 must be a multiple of --tensor-model-parallel-size 5" in told


def test_a_failing_rank_ends_with_1_and_its_message(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    log = tmp_path / "log.jsonl"
    assert main([*TINY, *SHORT, "--output", str(log), "--device", "cuda", "--rows", "dp2"]) == 1
    assert "--device cuda: row dp2 has 2 rank(s), this machine 0 GPU(s)" in capsys.readouterr().err
    assert not log.exists()


def test_the_folder_is_a_program_from_anywhere(tmp_path: Path) -> None:
    """Without the repository on the path, for itself as for the rank that it starts."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [sys.executable, str(FOLDER), *TINY, "--device", "cuda", "--rows", "megasnn"]
    ended = subprocess.run(
        command, cwd=tmp_path, env=environment | {"CUDA_VISIBLE_DEVICES": ""}, capture_output=True, text=True
    )
    assert ended.returncode == 1 and "row megasnn has 1 rank(s), this machine 0 GPU(s)" in ended.stderr
