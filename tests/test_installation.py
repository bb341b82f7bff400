"""torchvision and torchaudio, whose builds may not fit torch's, are not needed by us.

Recipes, which are installed with the package."""

from __future__ import annotations

import importlib
import pkgutil
import sys
import tomllib
from pathlib import Path

import megasnn
from megasnn.models.registry import MODELS
from megasnn.pretraining import pretrain
from tests.forking import forking

ROOT = Path(__file__).parents[1]
NMS = "operator torchvision::nms does not exist"
NOT_NEEDED = {"torchvision", "torchaudio"}


def import_everything(folder: str) -> None:
    """In a process that has imported part of it already, while the two could still be imported."""
    assert not NOT_NEEDED & sys.modules.keys()
    sys.path.insert(0, folder)
    for program in ("pretrain_spikformer", "pretrain_vgg_dvs"):
        importlib.import_module(program)
    for module in pkgutil.walk_packages(megasnn.__path__, "megasnn."):
        try:
            importlib.import_module(module.name)
        except ModuleNotFoundError as error:  # of its own part of the kernels, where there is none
            assert error.name == "triton" and module.name.startswith("megasnn.kernels.triton.")


def test_nothing_of_ours_imports_torchvision_or_torchaudio(tmp_path) -> None:
    for name in NOT_NEEDED:
        (tmp_path / f"{name}.py").write_text(f"raise RuntimeError({NMS!r})")
    process = forking().Process(target=import_everything, args=(str(tmp_path),))
    process.start()
    process.join()
    assert process.exitcode == 0


def test_recipes_are_installed_with_the_package() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    (pattern,) = settings["package-data"]["*"]
    installed = {file for init in (ROOT / "megasnn").rglob("__init__.py") for file in init.parent.glob(pattern)}
    recipes = {name: path for entry in MODELS.values() for name, path in entry.recipes().items()}
    assert set(recipes.values()) == installed == set((ROOT / "megasnn").rglob("*.json"))
    assert {"spikformer/cifar10", "vgg_dvs/cifar10dvs"} <= recipes.keys()


def test_an_unknown_recipe_lists_those_there_are(capsys) -> None:
    assert pretrain("spikformer", ["--config", "spikformer/cifar100", "--train-iters", "1"]) == 2
    text = capsys.readouterr().err
    assert "--config spikformer/cifar100 is neither" in text and "spikformer/cifar10, spikformer/digits" in text
