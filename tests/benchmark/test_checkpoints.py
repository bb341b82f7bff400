"""The benchmark of checkpoints measures, logs and leaves nothing behind."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tools.benchmark.program import main


@pytest.mark.usefixtures("forked_ranks")
def test_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, log = tmp_path / "folder", tmp_path / "log.jsonl"
    folder.mkdir()
    small = "--embed-dim 32 --depth 1 --num-heads 2 --rounds 2 --steps 1 --tensor 2 --pipeline 2".split()
    arguments = ["--checkpoint", *small, "--folder", str(folder), "--output", str(log)]
    assert main(arguments) == 0
    (line,) = map(json.loads, log.read_text().splitlines())
    assert line["configuration"]["layout"] == "tp2pp2"
    assert all(line["seconds"][figure]["median"] > 0 for figure in ("save", "load", "cp", "save_call", "step"))
    assert line["save_ratio"]["median"] > 0 and line["load_ratio"]["median"] > 0
    assert 0 < line["gigabytes"] < 0.01 and line["conversion"]["seconds"] > 0
    assert not list(folder.iterdir())
    printed = capsys.readouterr().out
    assert "of a save" in printed and "reshard to tp2pp2" in printed


@pytest.mark.parametrize(
    "flags, reason",
    [(["--rounds", "0"], "--rounds"), (["--tensor", "5"], "--num-heads 12"), (["--folder", "/none"], "no folder")],
)
def test_what_cannot_be_measured_is_refused(capsys: pytest.CaptureFixture[str], flags: list[str], reason: str) -> None:
    assert main(["--checkpoint", *flags]) == 2
    assert reason in capsys.readouterr().err
