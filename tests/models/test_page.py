"""The program that docs/models.md begins with, as a reader would run it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.forking import run_program

ROOT = Path(__file__).parents[2]
FLAGS = (
    "--train-iters 2 --micro-batch-size 4 --global-batch-size 8 --image-size 8 --time-steps 2 --eval-iters 1 "
    "--log-interval 1 --num-workers 0"
).split()


@pytest.fixture(scope="module")
def program(tmp_path_factory) -> Path:
    code = (ROOT / "docs/models.md").read_text().split("```python\n")[1].split("```")[0]
    path = tmp_path_factory.mktemp("page") / "small_sew.py"
    path.write_text(code)
    return path


def run(*words: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *map(str, words)], cwd=ROOT, capture_output=True, text=True, timeout=120)


def test_it_trains_saves_and_resumes_on_two_ranks(program: Path, tmp_path: Path) -> None:
    alone = run_program(ROOT, program, *FLAGS, "--save", tmp_path)
    assert alone.returncode == 0, alone.stderr
    assert "SmallSewResNet with" in alone.stdout and "validation at iteration 2" in alone.stdout
    ranks = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    flags = (*FLAGS, "--load", tmp_path, "--train-iters", "3", "--tensor-model-parallel-size", "2")
    two = run(*ranks, program, *flags)
    assert two.returncode == 0, two.stderr
    assert "continuing at iteration 2" in two.stdout and "iteration 3/ 3" in two.stdout.replace("  ", " ")


def test_its_fields_are_flags_and_the_models_of_the_registry_train_by_their_name(program: Path) -> None:
    shown = run_program(ROOT, program, "--help")
    assert shown.returncode == 0 and "--blocks INT" in shown.stdout and "Channels of the first stage." in shown.stdout
    trained = run_program(ROOT, "-m", "megasnn", "sew_resnet", *FLAGS, "--width", "8", "--image-size", "32")
    assert trained.returncode == 0, trained.stderr
    unknown = run_program(ROOT, "-m", "megasnn", "sew_resnett")
    assert unknown.returncode == 2 and "'sew_resnett'" in unknown.stderr
