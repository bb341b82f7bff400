"""What needs no torch starts without it, and the package's public names are there when they are used."""

from __future__ import annotations

import importlib
import subprocess
import sys

import pytest

import megasnn

WITHOUT_TORCH = {
    "imports": "import megasnn, megasnn.schedule, megasnn.config, megasnn.models.registry, megasnn.pretraining",
    "public names": "import megasnn; megasnn.pretrain, megasnn.MODELS, megasnn.PretrainConfig, megasnn.Model",
    "flags": """
from megasnn import MODELS, parse, validate
from megasnn.models.model import run_config
for model in MODELS.values():
    config = parse(run_config(model), ["--train-iters", "1", "--tensor-model-parallel-size", "2"])
    validate(config, world_size=2)
""",
    "a drawing": """
from megasnn.commands.draw_schedule import main
main(["zbv", "--stages", "2", "--micro-batches", "2"])
""",
}


@pytest.mark.parametrize("name", WITHOUT_TORCH)
def test_what_needs_no_torch_starts_without_it(name) -> None:
    program = f"{WITHOUT_TORCH[name]}\nimport sys\nsys.exit(3 if 'torch' in sys.modules else 0)"
    ended = subprocess.run([sys.executable, "-c", program], timeout=60, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr


@pytest.mark.parametrize("name", megasnn.__all__)
def test_each_public_name_is_what_its_module_calls_so(name) -> None:
    value = getattr(megasnn, name)
    # A value that is no class or function does not know where it comes from.
    module = {"MODELS": "megasnn.models.registry", "__version__": "megasnn.version"}.get(name) or value.__module__
    assert getattr(importlib.import_module(module), name) is value
    assert name in dir(megasnn)


def test_what_is_no_public_name_is_refused() -> None:
    with pytest.raises(AttributeError, match="module 'megasnn' has no attribute 'ParallelConf'"):
        getattr(megasnn, "ParallelConf")  # noqa: B009
