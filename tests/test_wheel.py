"""The wheel holds the package, installs beside its requirements, and trains where there is no checkout.

It is built from a folder that is no checkout, which a downloaded archive is too.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import zipfile
from importlib import import_module
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SCRIPTS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
BUILD = "import sys; from setuptools import build_meta; print(build_meta.build_wheel(sys.argv[1]))"


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a wheel is made of, without git."""
    folder = tmp_path_factory.mktemp("source")
    shutil.copytree(ROOT / "megasnn", folder / "megasnn", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "LICENSE"):
        shutil.copy(ROOT / name, folder)
    return folder


def run(*words: str | Path, cwd: Path) -> str:
    """What a program prints that ends well. It finds nothing in the checkout."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    ended = subprocess.run(words, cwd=cwd, env=environment, capture_output=True, text=True, timeout=300)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout


def test_a_wheel_holds_every_file_of_the_package(source, tmp_path) -> None:
    name = run(sys.executable, "-c", BUILD, tmp_path, cwd=source).splitlines()[-1]
    with zipfile.ZipFile(tmp_path / name) as wheel:
        packed = {Path(file) for file in wheel.namelist() if file.startswith("megasnn/")}
    package = ROOT / "megasnn"
    files = {file.relative_to(ROOT) for file in package.rglob("*") if file.suffix != ".pyc" and file.is_file()}
    assert packed == files


@pytest.mark.parametrize("name", SCRIPTS)
def test_every_installed_program_has_its_function(name) -> None:
    module, _, function = SCRIPTS[name].partition(":")
    assert callable(getattr(import_module(module), function))


def test_every_program_beside_training_is_installed() -> None:
    programs = {file.stem for file in (ROOT / "megasnn" / "commands").glob("*.py")} - {"__init__"}
    installed = {f"megasnn-{program.replace('_', '-')}": f"megasnn.commands.{program}:program" for program in programs}
    assert SCRIPTS == {"megasnn": "megasnn.__main__:main", **installed}


@pytest.mark.matrix
def test_a_wheel_installs_and_trains_without_the_checkout(source, tmp_path) -> None:
    """Builds as pip does: with the build requirements of pyproject.toml, which it takes from a package index."""
    run(sys.executable, "-m", "pip", "wheel", "--no-deps", "--wheel-dir", tmp_path, source, cwd=tmp_path)
    (wheel,) = tmp_path.glob("*.whl")
    assert wheel.name == "megasnn-0.0-py3-none-any.whl"

    run(sys.executable, "-m", "venv", tmp_path / "venv", cwd=tmp_path)
    programs = tmp_path / "venv" / "bin"
    (packages,) = (tmp_path / "venv" / "lib").glob("python*/site-packages")
    # The requirements are those of this environment; what it has installed as links to a checkout is not found.
    (packages / "requirements.pth").write_text(f"{sysconfig.get_path('purelib')}\n")
    run(programs / "python", "-m", "pip", "install", "--no-deps", "--no-index", wheel, cwd=tmp_path)

    found = run(programs / "python", "-c", "import megasnn; print(megasnn.__version__, megasnn.__file__)", cwd=tmp_path)
    assert found == f"0.0 {packages / 'megasnn' / '__init__.py'}\n"
    for name in SCRIPTS:
        assert "usage" in run(programs / name, "--help", cwd=tmp_path).lower()
    short = ["--config", "spikformer/digits", "--lr-warmup-iters", "0", "--train-iters", "2", "--save", "here"]
    run(programs / "megasnn", "spikformer", *short, cwd=tmp_path)
    launcher = [programs / "python", "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    more = ["--load", "here", "--train-iters", "4", "--pipeline-model-parallel-size", "2"]
    run(*launcher, "-m", "megasnn", "spikformer", *short, *more, cwd=tmp_path)
    assert "no problem(s)" in run(programs / "megasnn-convert-checkpoint", "verify", "here", cwd=tmp_path)
    assert (tmp_path / "here" / "latest_checkpointed_iteration.txt").read_text() == "4\n"
