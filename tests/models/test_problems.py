"""What is wrong with a model is told with the flags that it comes of."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from spikingjelly.activation_based import neuron as sj
from torch import nn

from megasnn.kernels import NeuronSpec
from megasnn.layers import ConvNormNeuron, MeanLinear
from megasnn.layers.context import context_for
from megasnn.models.layer import Layer, layer
from megasnn.models.model import Model
from megasnn.models.problems import building_problems
from megasnn.models.qkformer.dimensions import QKFormer
from megasnn.models.sew_resnet.dimensions import SewResNet
from megasnn.models.spike_driven.dimensions import SpikeDrivenTransformer
from megasnn.models.table import MODELS
from megasnn.pretraining import pretrain


@dataclass(frozen=True, kw_only=True)
class Hidden(Model):
    """A unit whose size no flag gives, behind one of a flag; neurons may be SpikingJelly's, which know no flags."""

    image_size: int = 8
    width: int = 12
    depth: int = 1
    plain: bool = False
    threshold: float | None = None

    def layers(self) -> Iterable[Layer]:
        if self.plain:
            yield layer("conv", nn.Conv2d(3, 12, 3))
            yield layer("neuron", sj.LIFNode(step_mode="m"))
        else:
            spec = None if self.threshold is None else NeuronSpec(v_threshold=self.threshold)
            yield layer("a", ConvNormNeuron(3, self.width, 3, neuron=spec))
            yield layer("b", ConvNormNeuron(self.width, 10, 3, neuron=spec))
        yield layer("head", MeanLinear(12 if self.plain else 10, self.num_classes))


@dataclass
class Limit:
    threshold: float

    def exceeds(self, x: torch.Tensor) -> torch.Tensor:
        return x > self.threshold


class Fires(nn.Module):
    """Knows the neuron of the flags in a way of its own."""

    def __init__(self, how: str) -> None:
        super().__init__()
        threshold = context_for(None).neuron.v_threshold
        self.knows = {
            "tuple": (threshold,),
            "dict": {"at": [threshold]},
            "object": SimpleNamespace(threshold=threshold),
            "function": lambda x: x >= threshold,
            "method": Limit(threshold).exceeds,
            "partial": partial(torch.ge, other=threshold),
        }[how]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


@dataclass(frozen=True, kw_only=True)
class Own(Model):
    image_size: int = 8
    how: str = ""

    def layers(self) -> Iterable[Layer]:
        yield layer("fires", Fires(self.how))
        yield layer("head", MeanLinear(3, self.num_classes))


@pytest.mark.parametrize(
    ("model", "ranks", "size", "flags"),
    [
        (SewResNet(), 3, "the first layer: out_channels 64", "--width 64"),
        (QKFormer(), 5, "the first layer: out_channels 48", "--embed-dim 384"),
        (SpikeDrivenTransformer(), 7, "the first layer: out_channels 48", "--embed-dim 384"),
        (Hidden(), 5, "the first layer: out_channels 12", "--width 12"),
    ],
)
def test_a_size_that_cannot_be_cut_names_the_flag_that_gives_it(model, ranks, size, flags) -> None:
    (problem,) = building_problems(model, NeuronSpec(), ranks)
    expected = f"{model.name}: {size} does not divide by --tensor-model-parallel-size {ranks} (change {flags})"
    assert problem == expected


def test_a_size_that_no_flag_gives_names_the_layer() -> None:
    (problem,) = building_problems(Hidden(), NeuronSpec(), 4)
    assert problem == "hidden: the layer behind a: out_channels 10 does not divide by --tensor-model-parallel-size 4"


def test_what_ranks_cannot_share_is_refused_before_anything_is_built() -> None:
    """By name, and with the sizes that would do."""
    model = replace(SewResNet(), image_size=64)
    (problem,) = building_problems(model, NeuronSpec(), 1, context_parallel=4, cut="rows")
    assert problem == (
        "sew_resnet: layer4.0, given [4, 2, 256, 4, 4]: in first.conv: there are 2 row(s) for 4 ranks: with "
        "--context-parallel-cut rows, --context-parallel-size may be 2 at most here; by rows 2 ranks can share this "
        "model, by samples as many as --micro-batch-size has"
    )
    assert building_problems(model, NeuronSpec(), 1, context_parallel=2, cut="rows") == []
    assert building_problems(model, NeuronSpec(), 1, context_parallel=4) == []


MOST = {"qkformer": 2, "sew_resnet": 1, "spike_driven": 2, "spikformer": 8, "vgg_dvs": 4}
"""How many ranks can share images of 32 rows."""


@pytest.mark.parametrize("name", MOST)
def test_the_number_of_ranks_that_is_named_would_do(name: str) -> None:
    """In every layer: the first one that has too few rows may have more than a later one."""
    model, most = replace(MODELS[name](), image_size=32), MOST[name]
    (problem,) = building_problems(model, NeuronSpec(), 1, context_parallel=16, cut="rows")
    said = f"by rows {most} ranks can" if most > 1 else "fewer ranks cannot share it by rows either"
    assert said in problem
    assert building_problems(model, NeuronSpec(), 1, context_parallel=most, cut="rows") == []
    assert building_problems(model, NeuronSpec(), 1, context_parallel=most + 1, cut="rows") != []


@dataclass(frozen=True, kw_only=True)
class Deep(Model):
    depth: int = 10**12

    def layers(self) -> Iterable[Layer]:
        for number in range(self.depth):
            yield layer(f"layer.{number}", torch.relu)


def test_a_depth_that_would_take_all_memory_is_refused() -> None:
    """As the configuration of a stranger's checkpoint may have it."""
    (problem,) = building_problems(Deep(), NeuronSpec(), 1)
    assert problem == "deep: the layer behind layer.4000: a model has up to 4000 layers"


IN_VAIN = "changes nothing in hidden: no neuron of it takes this from the flags"


def test_flags_of_neurons_that_the_model_does_not_have_are_refused_by_name() -> None:
    given = NeuronSpec("if", 3.0, v_reset=None, decay_input=False, surrogate="atan", alpha=5.0)
    names = ("--neuron", "--tau", "--v-reset", "--decay-input", "--surrogate", "--surrogate-alpha")
    for model in (Hidden(plain=True), Hidden(threshold=0.5)):
        assert building_problems(model, given, 1) == [f"{name} {IN_VAIN}" for name in names]
        assert building_problems(model, NeuronSpec(surrogate="atan"), 1) == [f"--surrogate {IN_VAIN}"]
        assert building_problems(model, NeuronSpec(), 1) == []
    assert building_problems(Hidden(), given, 1) == []


@pytest.mark.parametrize("how", ["tuple", "dict", "object", "function", "method", "partial"])
def test_what_takes_a_neuron_in_its_own_way_is_not_refused(how) -> None:
    assert building_problems(Own(how=how), NeuronSpec(v_threshold=0.5), 1) == []


def test_kernels_for_neurons_that_the_model_does_not_have_are_refused() -> None:
    (problem,) = building_problems(Hidden(plain=True), NeuronSpec(), 1, "torch")
    assert problem == "--neuron-backend torch changes nothing in hidden: no neuron of it is computed by our kernels"
    assert building_problems(Hidden(plain=True), NeuronSpec(), 1, "auto") == []
    assert building_problems(Hidden(), NeuronSpec(), 1, "torch") == []


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        ("--in-channels 7", "images have 1 or 3 channels, not 7; set --in-channels to 1 or 3"),
        ("--split-by time", "--split-by: the model takes images; leave it out"),
    ],
)
def test_samples_that_no_shard_holds_are_refused_before_ranks_start(capfd, flags, problem) -> None:
    given = ["--config", "sew_resnet/digits", *flags.split()]
    assert pretrain("sew_resnet", given) == 2
    assert problem in capfd.readouterr().err
    assert pretrain("sew_resnet", [*given, "--model-summary"]) == 0


@pytest.mark.parametrize("name", MODELS)
def test_every_model_of_the_table_takes_every_flag_of_a_neuron(name) -> None:
    model = MODELS[name]()
    usual = model.neuron().spec
    changed = {"kind": "plif", "tau": 3.0, "v_threshold": 0.75, "v_reset": None, "surrogate": "erf", "alpha": 7.0}
    changed |= {"decay_input": not usual.decay_input, "detach_reset": not usual.detach_reset}
    assert building_problems(model, replace(usual, **changed), 1) == []
