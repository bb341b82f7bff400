"""The benchmark of the kernels: a row for each number of channels, in copies of the input."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from tools.benchmark.program import main


@pytest.mark.parametrize("more", [[], ["--pool", "--neuron-backend", "torch"]], ids=["", "pool"])
def test_a_run(more: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log, threads = tmp_path / "log.jsonl", torch.get_num_threads()
    arguments = ["--kernels", *"--channels 3 8 --mebibytes 0.05 --rounds 2 --output".split(), str(log), *more]
    assert main(arguments) == 0 and main(arguments) == 0
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    assert [line["row"] for line in lines] == ["3 channels", "8 channels"] * 2
    assert all(line[name]["median"] > 0 for line in lines for name in ("copy_ms", "forward_copies", "backward_copies"))
    assert torch.get_num_threads() == threads and "%" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        (["--channels", "0"], "--channels 0 must be at least 1"),
        (["--mebibytes", "0.001"], "--mebibytes 0.001 are less than 2 x 2 pixels of --channels 1536"),
    ],
)
def test_flags_without_sense(flags: list[str], problem: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--kernels", *flags]) == 2
    assert problem in capsys.readouterr().err
