"""The lowest layer needs no torch, and what it repeats of the layers above is the same there."""

import importlib
import subprocess
import sys
from typing import get_args

import pytest

import megasnn
from megasnn.config import NeuronConfig
from megasnn.config.neuron import Surrogate
from megasnn.kernels import NeuronSpec
from megasnn.kernels.spec import SURROGATES

LOWEST = (
    "megasnn",
    "megasnn.grid",
    "megasnn.batching",
    "megasnn.schedule.partition",
    "megasnn.schedule",
    "megasnn.schedule.simulate",
    "megasnn.config",
    "megasnn.events",
    "megasnn.models.table",
    "megasnn.pretraining",
)
WITHOUT_TORCH = {
    "imports": f"import {', '.join(LOWEST)}",
    "public names": "import megasnn; megasnn.pretrain, megasnn.MODELS, megasnn.PretrainConfig, megasnn.ModelEntry",
    "flags": """
from megasnn import MODELS, parse, validate
for entry in MODELS.values():
    config = parse(entry.config, ["--train-iters", "1", "--pipeline-model-parallel-size", "2"])
    validate(config, world_size=2)
""",
    "a drawing": """
from tools.draw_schedule import main
main(["zbv", "--stages", "2", "--micro-batches", "2"])
""",
}


@pytest.mark.parametrize("name", WITHOUT_TORCH)
def test_what_needs_no_torch_starts_without_it(name) -> None:
    program = f"{WITHOUT_TORCH[name]}\nimport sys\nsys.exit(3 if 'torch' in sys.modules else 0)"
    ended = subprocess.run([sys.executable, "-c", program], timeout=60, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr


def test_the_surrogates_on_the_command_line_are_those_of_the_kernels() -> None:
    assert set(get_args(Surrogate)) == set(SURROGATES)


def test_the_neurons_defaults_are_those_of_its_description() -> None:
    config = NeuronConfig()
    spec = NeuronSpec(
        config.neuron,
        config.tau,
        config.v_threshold,
        config.v_reset,
        config.decay_input,
        config.detach_reset,
        config.surrogate,
        config.surrogate_alpha,
    )
    assert spec == NeuronSpec()


@pytest.mark.parametrize("name", megasnn.__all__)
def test_each_public_name_is_what_its_module_calls_so(name) -> None:
    value = getattr(megasnn, name)
    assert getattr(importlib.import_module(getattr(value, "__module__", "megasnn.models.table")), name) is value
    assert name in dir(megasnn)


def test_a_name_that_is_none_is_refused() -> None:
    with pytest.raises(AttributeError, match="module 'megasnn' has no attribute 'ParallelConf'"):
        megasnn.ParallelConf  # noqa: B018
