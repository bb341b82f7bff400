"""Values that only constructors set: SpikingJelly's PSN, SlidingPSN, GatedLIF, WSConv2d, WSLinear, and one's own."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from spikingjelly.activation_based import functional, neuron
from spikingjelly.activation_based import layer as sj
from torch import Tensor, nn

import megasnn
from megasnn.layers import BuildContext, Numerics
from megasnn.layers.apply import apply_layer
from megasnn.layers.layer import Layer, layer
from megasnn.layers.tensors import materialise
from megasnn.models.build import describe_model
from tests.models.networks import between
from tests.parity.ranks import Layout, assemble, assert_equal_to_one

STEPS = 2
NUMERICS = Numerics(torch.float64, torch.float64)


class Flat(nn.Module):
    """WSLinear on all values of a sample, back in the shape of images."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = sj.WSLinear(64, 64, step_mode="m")

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x.flatten(2)).view(x.shape)


MODULES: dict[str, Callable[[], nn.Module]] = {
    "psn": partial(neuron.PSN, STEPS),
    "sliding": partial(neuron.SlidingPSN, 2, step_mode="m"),
    "sliding, drawn": partial(neuron.SlidingPSN, 3, exp_init=False, step_mode="m"),
    "gated": partial(neuron.GatedLIFNode, STEPS, 4, init_tau=0.3, init_v_threshold=0.2),
    "gated, one for all": partial(neuron.GatedLIFNode, STEPS, init_v_threshold=0.2),
    "convolution": partial(sj.WSConv2d, 4, 4, 3, padding=1, step_mode="m"),
    "linear": Flat,
}


def it(make: Callable[[], nn.Module], shards: bool = False) -> Iterable[Layer]:
    yield layer("it", megasnn.shard(make()) if shards else make())


def built(make: Callable[[], nn.Module], seed: int = 3) -> nn.Module:
    """A layer of a model, with its initial values."""
    model = between(partial(it, make))
    layers = dict(describe_model(model).named_layers(BuildContext(numerics=NUMERICS, time_steps=STEPS)))
    materialise([("it", layers["it"])], torch.device("cpu"), seed)
    return layers["it"]


@pytest.mark.parametrize("name", MODULES)
def test_equals_spikingjelly(name: str) -> None:
    """Outputs and gradients, at the initial values."""
    ours = built(MODULES[name])
    theirs = MODULES[name]().double()
    theirs.load_state_dict(ours.state_dict())
    x = torch.randn(STEPS, 3, 4, 4, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64) + 0.5
    inputs = [x.clone().requires_grad_() for _ in range(2)]
    weights = torch.randn(x.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    outputs = [apply_layer(ours, inputs[0], range(3)), theirs(inputs[1])]
    functional.reset_net(theirs)
    for output in outputs:
        (output * weights).sum().backward()
    assert (outputs[0] - outputs[1]).abs().max() < 1e-12 and outputs[0].any()
    assert (inputs[0].grad - inputs[1].grad).abs().max() < 1e-12 and inputs[0].grad.any()
    for (path, found), expected in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        assert (found.grad - expected.grad).abs().max() < 1e-11, path
        assert found.grad.any(), path


def test_values_are_the_constructors() -> None:
    gated = built(MODULES["gated"])
    assert gated.tau.tolist() == pytest.approx([-math.log(1 / 0.3 - 1)] * 4, rel=1e-6)
    assert gated.v_threshold.tolist() == pytest.approx([-math.log(1 / 0.2 - 1)] * 4, rel=1e-6)
    assert gated.linear_decay.tolist() == pytest.approx([-math.log(4 / 0.2 - 1)] * 4, rel=1e-6)
    assert gated.conduct.shape == (STEPS, 4) and not gated.conduct.any()
    assert built(MODULES["sliding"]).weight.tolist() == [0.5, 1.0]
    assert built(MODULES["convolution"]).gain.unique().tolist() == [1.0]
    psn = built(MODULES["psn"])
    assert psn.bias.unique().tolist() == [-1.0] and 0 < psn.weight.abs().max() <= STEPS**-0.5


def test_draws_follow_the_seed_and_leave_the_programs_own_alone() -> None:
    """NumPy's, which GatedLIFNode draws from, and torch's."""
    names = {"gated": "alpha", "sliding, drawn": "weight"}
    for name, parameter in names.items():
        np.random.seed(5)
        expected = np.random.rand()
        np.random.seed(5)
        first = getattr(built(MODULES[name]), parameter)
        assert np.random.rand() == expected
        np.random.seed(6)
        assert torch.equal(getattr(built(MODULES[name]), parameter), first)
        assert not torch.equal(getattr(built(MODULES[name], seed=4), parameter), first)


LAYOUTS = [Layout(tensor=2), Layout(data=2)]


@pytest.mark.parametrize("shards", [False, True])
@pytest.mark.parametrize("name", MODULES)
def test_every_layout_computes_the_same(ranks, name: str, shards: bool) -> None:
    one = assert_equal_to_one(ranks, between(partial(it, MODULES[name], shards)), LAYOUTS)
    gradients = assemble([one], "gradients")
    assert all(value.any() for path, value in gradients.items() if path.startswith("it."))


class Scaled(nn.Module):
    """A module of one's own with a value from its arguments."""

    def __init__(self, channels: int, *, start: float, **more: Any) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.full((channels, 1, 1), start))
        self.register_buffer("mask", torch.tensor([True, False]))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale


class Inside(nn.Module):
    """Its constructor makes the tensors of another module, too."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4, 1, 1))
        self.conv = nn.Conv2d(4, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(x.flatten(0, 1)).unflatten(0, x.shape[:2]) * self.scale


def test_modules_of_ones_own_keep_theirs_too() -> None:
    scaled = built(partial(Scaled, 4, start=0.25))
    assert scaled.scale.unique().tolist() == [0.25] and scaled.mask.tolist() == [True, False]
    assert built(partial(Scaled, 4, start=0.5, other=1)).scale.unique().tolist() == [0.5]


def test_a_constructor_that_makes_other_modules_is_not_called_again() -> None:
    with pytest.raises(
        ValueError, match=r"it\.scale: nothing initialises 'scale' of Inside: its constructor.*initialise="
    ):
        built(Inside)
