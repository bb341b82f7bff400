"""The package: no torchvision needed, torch only where it must be, recipes and programs in the wheel, public names."""

from __future__ import annotations

import importlib
import os
import pkgutil
import shutil
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Callable
from importlib import import_module
from pathlib import Path

import pytest

import megasnn
from megasnn.models.registry import MODELS
from megasnn.pretraining import pretrain
from tests.forking import forking

ROOT = Path(__file__).parents[1]
SETTINGS = tomllib.loads((ROOT / "pyproject.toml").read_text())
SCRIPTS = SETTINGS["project"]["scripts"]
NOT_NEEDED = {"torchvision", "torchaudio"}
BUILD = "import sys; from setuptools import build_meta; print(build_meta.build_wheel(sys.argv[1]))"
WITHOUT_TORCH = """
import megasnn, megasnn.schedule, megasnn.config, megasnn.pretraining
megasnn.pretrain, megasnn.PretrainConfig, megasnn.Model
from megasnn import MODELS, parse, validate
from megasnn.models.model import run_config
for model in MODELS.values():
    validate(parse(run_config(model), ["--train-iters", "1", "--tensor-model-parallel-size", "2"]), world_size=2)
from megasnn.commands.draw_schedule import main
main(["zbv", "--stages", "2", "--micro-batches", "2"])
import sys
sys.exit(3 if "torch" in sys.modules else 0)
"""


def import_everything(folder: str) -> None:
    """In a process that has imported part of it already, while the two could still be imported."""
    assert not NOT_NEEDED & sys.modules.keys()
    sys.path.insert(0, folder)
    for program in ("pretrain_spikformer", "pretrain_vgg_dvs"):
        importlib.import_module(program)
    import_modules()


def import_modules(backwards: bool = False) -> None:
    """All modules of the package; backwards as if none had been imported before, each before its package's others."""
    names = [module.name for module in pkgutil.walk_packages(megasnn.__path__, "megasnn.")]
    for loaded in [name for name in sys.modules if backwards and name.split(".")[0] == "megasnn"]:
        del sys.modules[loaded]
    for name in reversed(names) if backwards else names:
        try:
            importlib.import_module(name)
        except ModuleNotFoundError as error:  # of its own part of the kernels, where there is none
            assert error.name == "triton" and name.startswith("megasnn.kernels.triton.")


def ended_well(target: Callable[..., None], *arguments: object) -> bool:
    process = forking().Process(target=target, args=arguments)
    process.start()
    process.join()
    return process.exitcode == 0


def test_nothing_of_ours_imports_torchvision_or_torchaudio(tmp_path) -> None:
    """Their builds may not fit torch's."""
    for name in NOT_NEEDED:
        (tmp_path / f"{name}.py").write_text("raise RuntimeError('operator torchvision::nms does not exist')")
    assert ended_well(import_everything, str(tmp_path))


def test_modules_are_imported_in_any_order() -> None:
    """A circle of imports fails in one of two opposite orders."""
    assert ended_well(import_modules, True)


def test_flags_and_drawings_need_no_torch() -> None:
    ended = subprocess.run([sys.executable, "-c", WITHOUT_TORCH], timeout=60, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr


def test_public_names_are_there() -> None:
    for name in {*megasnn.__all__} - {"__version__"}:
        value = getattr(megasnn, name)
        # A value that is no class or function does not know where it comes from.
        module = "megasnn.models.registry" if name == "MODELS" else value.__module__
        assert getattr(importlib.import_module(module), name) is value and name in dir(megasnn)
    with pytest.raises(AttributeError, match="ParallelConf"):
        getattr(megasnn, "ParallelConf")  # noqa: B009


def test_an_unknown_recipe_lists_those_there_are(capsys) -> None:
    assert pretrain("spikformer", ["--config", "spikformer/cifar100", "--train-iters", "1"]) == 2
    text = capsys.readouterr().err
    assert "--config spikformer/cifar100" in text and "spikformer/cifar10, spikformer/digits" in text


def test_a_wheel_holds_every_file_of_the_package(tmp_path) -> None:
    """Built from a folder that is no checkout, which a downloaded archive is too."""
    source, package = tmp_path / "source", ROOT / "megasnn"
    shutil.copytree(package, source / "megasnn", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "LICENSE", "README.md"):
        shutil.copy(ROOT / name, source)
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    words = [sys.executable, "-c", BUILD, tmp_path]
    ended = subprocess.run(words, cwd=source, env=environment, capture_output=True, text=True, timeout=300)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    name = ended.stdout.splitlines()[-1]
    with zipfile.ZipFile(tmp_path / name) as wheel:
        packed = {Path(file) for file in wheel.namelist() if file.startswith("megasnn/")}
        metadata = next(wheel.read(file).decode() for file in wheel.namelist() if file.endswith("METADATA"))
    assert Path("megasnn/py.typed") in packed
    assert metadata.endswith((ROOT / "README.md").read_text()) and "text/markdown" in metadata
    files = {file.relative_to(ROOT) for file in package.rglob("*") if file.suffix != ".pyc" and file.is_file()}
    assert packed == files
    recipes = {path for entry in MODELS.values() for path in entry.recipes().values()}
    assert recipes == set(package.rglob("*.json"))


def test_every_program_is_installed() -> None:
    programs = {file.stem for file in (ROOT / "megasnn" / "commands").glob("*.py")} - {"__init__", "flags"}
    assert SCRIPTS.keys() == {"megasnn", *(f"megasnn-{program.replace('_', '-')}" for program in programs)}
    for place in SCRIPTS.values():
        module, _, function = place.partition(":")
        assert callable(getattr(import_module(module), function))
