from __future__ import annotations

import json

import pytest

from megasnn.config import ConfigError, from_dict, parse, to_dict, validate
from megasnn.models.model import run_config
from megasnn.models.spikformer.dimensions import Spikformer
from megasnn.models.vgg_dvs.dimensions import (
    VggBlock,
    VggDvs,
    VggNeuronConfig,
    parse_channels,
)

LENGTH = ("--train-iters", "10")


def problems(*argv: str, world_size: int = 1) -> list[str]:
    try:
        validate(parse(run_config(VggDvs), [*LENGTH, *argv]), world_size)
    except ConfigError as error:
        return list(error.problems)
    return []


def test_channels() -> None:
    assert parse_channels("8, 16,p,32") == ((VggBlock(8, False), VggBlock(16, False), VggBlock(32, True)), False)
    assert parse_channels("P,8,P") == ((VggBlock(8, True),), True)
    default = VggDvs()
    assert [block.channels for block in default.blocks] == [64, 128, 256, 256, 512, 512, 512, 512]
    assert [block.pool for block in default.blocks] == [False, False, True, False, True, False, True, False]
    assert default.final_pool and default.final_size == 3
    assert [layer.unit for layer in default.layers()] == [*(f"features.{i}" for i in range(8)), "classifier"]


@pytest.mark.parametrize("text", ["", "P", "8,,16", "8,P,P,16", "8,Q", "0", "-8", "8.5"])
def test_malformed_channels_are_refused_with_the_flag(text: str) -> None:
    (problem,) = problems(f"--channels={text}")
    assert problem.startswith(f'--channels "{text}"')


@pytest.mark.parametrize(
    "argv, world_size, expected",
    [
        (("--image-size", "8"), 1, "--image-size 8 is too small for the 4 poolings"),
        (
            ("--channels", "8,12", "--tensor-model-parallel-size", "8"),
            8,
            "--channels: 12 must be a multiple of --tensor",
        ),
        (("--dropout", "1"), 1, "--dropout must be at least 0 and below 1, got 1.0"),
        (("--tensor-parallel-style", "alternate"), 1, "--tensor-parallel-style alternate needs"),
        (("--tet-lambda", "0.1"), 1, "--tet-lambda 0.1 is for --loss tet, not cross-entropy"),
        (("--loss", "tet", "--tet-lambda", "0", "--tet-mean", "2"), 1, "--tet-mean 2.0 is for --loss tet with"),
        (("--loss", "tet", "--tet-lambda", "1"), 1, "--tet-lambda must be at least 0 and below 1"),
        (("--neuron", "if", "--tau", "2"), 1, "--tau 2.0 has no meaning for --neuron if"),
        (("--neuron", "if", "--decay-input"), 1, "--decay-input has no meaning for --neuron if"),
        (("--log-pictures-interval", "5"), 1, "--log-pictures-interval 5 needs --tensorboard-dir"),
    ],
)
def test_what_cannot_work_is_refused(argv: tuple[str, ...], world_size: int, expected: str) -> None:
    found = problems(*argv, world_size=world_size)
    assert any(problem.startswith(expected) for problem in found), found


def test_what_works() -> None:
    assert problems("--neuron", "if") == []
    assert problems("--loss", "tet", "--tet-lambda", "0.05", "--tet-mean", "0.5") == []
    assert problems("--tensor-model-parallel-size", "2", "--tensor-parallel-style", "alternate", world_size=2) == []


def test_defaults_are_those_of_spikingjelly_and_survive_json() -> None:
    config = parse(run_config(VggDvs), [])
    neuron = config.neuron
    assert (neuron.tau, neuron.decay_input, neuron.surrogate, neuron.detach_reset) == (1.333, False, "atan", True)
    assert isinstance(neuron, VggNeuronConfig) and config.model == VggDvs()
    assert from_dict(run_config(VggDvs), json.loads(json.dumps(to_dict(config)))) == config


def test_spikformers_event_frames_need_two_channels() -> None:
    (problem,) = Spikformer(event_frames=True).problems(1)
    assert problem == "--event-frames have two polarities: set --in-channels 2, not 3"
    assert Spikformer(event_frames=True, in_channels=2).problems(1) == []
