"""The three commands of docs/checkpoints.md, taken from the page and run as they stand there."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from megasnn.checkpoint.folder import list_checkpoints
from megasnn.convert.reshard import Target, reshard
from megasnn.convert.source import open_source
from tests.forking import run_program
from tests.training.runs import train

ROOT = Path(__file__).parents[2]
LAYOUT_FLAGS = ("--standalone", "--nproc-per-node", "--tensor-model-parallel-size", "--load", "--save", "--train-iters")


def commands() -> list[str]:
    page = (ROOT / "docs" / "checkpoints.md").read_text()
    block = re.search(r"## On other hardware, in three commands.*?```bash\n(.*?)```", page, re.DOTALL)
    assert block is not None
    return block[1].replace("\\\n", " ").strip().splitlines()


def model_flags(command: str) -> list[str]:
    words = shlex.split(command)
    pairs = zip(words, words[1:], strict=False)
    return [word for pair in pairs if pair[0].startswith("--") and pair[0] not in LAYOUT_FLAGS for word in pair]


def as_the_page_says(cache: str, folder: Path, flags: list[str]) -> None:
    """A checkpoint of four ranks at iteration 200, of a run that did one iteration."""
    train(cache, *flags, "--mlp-ratio", "4", "--train-iters", "1", "--eval-iters", "0", "--save", str(folder / "one"))
    source = open_source(folder / "one", values=False)
    (folder / "one" / "iter_0000001").rename(folder / "one" / "iter_0000200")
    metadata = replace(source.metadata, iteration=200, consumed_samples=200 * 64)
    source = replace(source, path=folder / "one" / "iter_0000200", metadata=metadata)
    reshard(source, folder / "runs/spikformer_tp2_pp2/checkpoints", Target(2, 2, layout="5|5"))


@pytest.mark.slow
def test_the_three_commands(tmp_path: Path) -> None:
    cache = str(tmp_path / "cache")
    lines = commands()
    assert len(lines) == 3
    as_the_page_says(cache, tmp_path, model_flags(lines[2]))
    for name in ("tools", "megasnn", "pretrain_spikformer.py"):
        (tmp_path / name).symlink_to(ROOT / name)
    programs = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = os.environ | {"PYTHONPATH": str(ROOT), "MEGASNN_CACHE": cache, "PATH": programs}
    output = ""
    for line in lines:
        interpreter, *words = shlex.split(line)
        if interpreter == "python":  # without seconds of imports
            done = run_program(tmp_path, *words)
        else:
            done = subprocess.run(["bash", "-c", line], cwd=tmp_path, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
        output += done.stdout
    assert "no problem(s)" in output and "a file for each of 2 ranks" in output
    assert "continuing at iteration 200, 12800 samples consumed" in output
    assert list_checkpoints(tmp_path / "runs/two_ranks/checkpoints") == [200, 210]
