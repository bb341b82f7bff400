"""What is wrong with a model is told before anything has memory, with layer and flag."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import pytest

from megasnn.common.grid import Grid
from megasnn.kernels import NeuronSpec
from megasnn.layers import ConvNormNeuron, MeanLinear
from megasnn.layers.layer import Layer, layer
from megasnn.models.build import building_problems, describe_model
from megasnn.models.model import Model, run_config
from megasnn.models.qkformer.model import QKFormer
from megasnn.models.registry import MODELS
from megasnn.models.sew_resnet.model import SewResNet
from megasnn.models.spike_driven.model import SpikeDrivenTransformer
from megasnn.models.spikformer.model import Spikformer
from megasnn.pretraining import pretrain
from tests.models.networks import between

HIDDEN = between(lambda: [layer("a", ConvNormNeuron(12, 10)), layer("b", ConvNormNeuron(10, 12))], width=12)
"""A unit whose size no flag gives."""


@pytest.mark.parametrize(
    ("model", "ranks", "named"),
    [
        (SewResNet(), 3, ("the first layer", "64")),
        (QKFormer(), 5, ("the first layer", "48")),
        (SpikeDrivenTransformer(), 7, ("the first layer", "48")),
        (HIDDEN, 4, ("the layer behind stem", "10")),
    ],
)
def test_a_size_that_cannot_be_cut_is_named_with_layer_and_flag(model, ranks, named) -> None:
    (problem,) = building_problems(model, NeuronSpec(), Grid(tp=ranks))
    assert all(word in problem for word in (model.name, f"--tensor-model-parallel-size {ranks}", *named))
    assert building_problems(model, NeuronSpec()) == []


@dataclass(frozen=True, kw_only=True)
class EarlyTarget(Model):
    def layers(self) -> Iterable[Layer]:
        yield layer("stem", ConvNormNeuron(3, 4), takes=("images", "target"))
        yield layer("head", MeanLinear(4, 10))


def test_only_the_last_layer_may_take_the_target() -> None:
    (problem,) = building_problems(EarlyTarget(), NeuronSpec())
    assert "stem takes 'target': only the last layer" in problem


@dataclass(frozen=True, kw_only=True)
class Empty(Model):
    width: int
    image_size: int = 4
    time_steps: int = 2
    num_classes: int = 3

    def layers(self) -> Iterable[Layer]:
        return ()


def test_a_model_without_layers_and_a_field_without_a_default_are_refused() -> None:
    (problem,) = building_problems(Empty(width=1), NeuronSpec())
    assert "`layers`" in problem
    with pytest.raises(ValueError, match="Empty.width"):
        run_config(Empty)


def test_an_mlp_without_channels_is_refused() -> None:
    (problem,) = building_problems(Spikformer(mlp_ratio=0.001), NeuronSpec())
    assert "blocks.0.attention" in problem and "out_channels 0" in problem


MOST = {"e_spikeformer": 2, "qkformer": 2, "sew_resnet": 1, "spike_driven": 2, "spikformer": 8, "vgg_dvs": 4}
"""How many ranks can share images of 32 rows."""


@pytest.mark.parametrize("name", MOST)
def test_what_ranks_cannot_share_is_refused(name: str) -> None:
    model, most = replace(MODELS[name](), image_size=32), MOST[name]
    assert building_problems(model, NeuronSpec(), Grid(cp=most), "rows") == []
    (problem,) = building_problems(model, NeuronSpec(), Grid(cp=most + 1), "rows")
    assert "--context-parallel-size" in problem and model.name in problem
    assert building_problems(model, NeuronSpec(), Grid(cp=most + 1), "samples") == []


def test_a_model_is_described_once_and_layers_are_built_for_each_rank() -> None:
    model = SewResNet(image_size=32)
    described = describe_model(model)
    assert describe_model(replace(model)) is described and describe_model(replace(model, width=32)) is not described
    assert describe_model(model, NeuronSpec("if")) is not described
    assert described.tensors


@pytest.mark.parametrize(("flags", "named"), [("--in-channels 7", "--in-channels"), ("--split-by time", "--split-by")])
def test_samples_that_no_shard_holds_are_refused_before_ranks_start(capfd, flags, named) -> None:
    given = ["--config", "sew_resnet/digits", *flags.split()]
    assert pretrain("sew_resnet", given) == 2
    assert named in capfd.readouterr().err
