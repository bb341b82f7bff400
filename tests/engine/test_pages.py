"""The programs in README.md and docs/python.md, as a reader would run them."""

from __future__ import annotations

import contextlib
import csv
import io
import runpy
from pathlib import Path

import pytest
import torch

from tests.forking import run_program

ROOT = Path(__file__).parents[2]
TINY = (
    "--train-iters 2 --micro-batch-size 4 --global-batch-size 8 --image-size 8 --in-channels 1 --num-classes 10 "
    "--patch-size 4 --embed-dim 32 --depth 1 --num-heads 4 --time-steps 2 --num-workers 0 --log-interval 1 --save saved"
).split()


def program(page: str, heading: str, folder: Path) -> Path:
    """The first Python block below a heading, as a file."""
    code = (ROOT / page).read_text().split(f"## {heading}\n")[1].split("```python\n")[1].split("```")[0]
    path = folder / "program.py"
    path.write_text(code)
    return path


@pytest.fixture
def folder(tmp_path: Path, monkeypatch) -> Path:
    """Where the programs run, in this process."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_loop_of_the_page_learns(folder: Path, capsys) -> None:
    runpy.run_path(str(program("docs/python.md", "A loop of your own", folder)))
    accuracy = float(capsys.readouterr().out.split("accuracy ")[1].split("%")[0])
    assert accuracy > 80 and (folder / "checkpoints" / "iter_0000060").is_dir()
    assert "head.weight" in torch.load(folder / "weights.pt")


def test_the_loop_of_the_readme(folder: Path, capsys) -> None:
    runpy.run_path(str(program("README.md", "From Python", folder)))
    assert "torch.Size([8, 10])" in capsys.readouterr().out and (folder / "checkpoints" / "iter_0000002").is_dir()


def losses(path: str, folder: str) -> list[float]:
    """What the program of the README prints before its evaluation, in a folder of its own."""
    torch.manual_seed(17 + torch.distributed.get_rank())
    Path(folder).mkdir(exist_ok=True)
    with contextlib.chdir(folder), contextlib.redirect_stdout(io.StringIO()) as printed:
        runpy.run_path(path)
    return [float(line) for line in printed.getvalue().splitlines()[:2]]


def test_the_loop_of_the_readme_computes_the_same_on_two_ranks(ranks, tmp_path: Path) -> None:
    path = str(program("README.md", "From Python", tmp_path))
    (alone,) = ranks(1, losses, path, str(tmp_path / "1"))
    assert ranks(2, losses, path, str(tmp_path / "2")) == [pytest.approx(alone, rel=1e-6)] * 2


def test_the_tracker_of_the_page_keeps_what_a_run_tells(tmp_path: Path) -> None:
    ended = run_program(tmp_path, program("docs/python.md", "Callbacks", tmp_path), *TINY)
    assert ended.returncode == 0, ended.stderr
    with open(tmp_path / "run.csv", newline="") as file:
        rows = list(csv.reader(file))
    kept = {(name, int(iteration)): value for name, iteration, value in rows}
    assert kept["iterations", 0] == "2" and float(kept["lr", 0]) == 1e-3
    assert 0 < float(kept["training/loss", 1]) and 0 < float(kept["training/loss", 2])
    assert 0 <= float(kept["validation/accuracy_top1", 2]) <= 1
    assert kept["checkpoint", 2] == str(Path("saved/iter_0000002"))
