"""Recurrent neurons equal the published equations step by step, and a network of them is the same in every layout."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from examples.spiking_audio import CELLS, RecurrentAudio
from megasnn.common.grid import Grid
from megasnn.engine import Engine
from megasnn.layers import (
    BuildContext,
    LeakyReadout,
    Numerics,
    RecurrentAdLIF,
    RecurrentLIF,
    RecurrentNeuron,
    SymplecticAdLIF,
)
from megasnn.layers.tensors import materialise
from megasnn.models.build import describe_model
from megasnn.parallel_state import ParallelState
from megasnn.training.operations import Operations
from tests.parity.ranks import Layout, assemble, assert_equal_to_one

STEPS, SAMPLES, CHANNELS = 12, 5, 6
CONTEXT = BuildContext(numerics=Numerics(torch.float64, torch.float64), time_steps=STEPS)


def made(layer: Any, name: str = "neuron") -> Any:
    """The layer with its initial values, after the dry run that a model makes."""
    layer(torch.empty(STEPS, SAMPLES, CHANNELS, dtype=torch.float64, device="meta"))
    materialise([(name, layer)], torch.device("cpu"), seed=3)
    return layer


def currents(scale: float = 3.0) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    x = scale * torch.randn(STEPS, SAMPLES, CHANNELS, generator=generator, dtype=torch.float64)
    return x.requires_grad_()


def boxcar(x: Tensor) -> Tensor:
    """1 from 0 on; the gradient is 1 within half a unit."""
    near = ((x > -0.5) & (x < 0.5)).to(x.dtype)
    return (x >= 0).to(x.dtype) + near * (x - x.detach())


def slayer(x: Tensor) -> Tensor:
    slope = 0.4 * 5 / (2 * torch.exp(5 * x.detach().abs()))
    return (x >= 0).to(x.dtype) + slope * (x - x.detach())


def between(weight: Tensor) -> Tensor:
    return weight * (1 - torch.eye(len(weight), dtype=weight.dtype))


def rlif(x: Tensor, p: dict[str, Tensor]) -> Tensor:
    u = s = torch.zeros_like(x[0])
    spikes = []
    for current in x:
        drive = current + F.linear(s, between(p["recurrent.weight"]))
        u = p["alpha"] * (u - s) + (1 - p["alpha"]) * drive
        s = boxcar(u - 1)
        spikes.append(s)
    return torch.stack(spikes)


def radlif(x: Tensor, p: dict[str, Tensor]) -> Tensor:
    u = w = s = torch.zeros_like(x[0])
    spikes = []
    for current in x:
        w = p["beta"] * w + p["a"] * u + p["b"] * s
        drive = current + F.linear(s, between(p["recurrent.weight"])) - w
        u = p["alpha"] * (u - s) + (1 - p["alpha"]) * drive
        s = boxcar(u - 1)
        spikes.append(s)
    return torch.stack(spikes)


def se_adlif(x: Tensor, p: dict[str, Tensor]) -> Tensor:
    u_decay = torch.exp(-1 / (5 * (1 - p["u_part"]) + 25 * p["u_part"]))
    w_decay = torch.exp(-1 / (60 * (1 - p["w_part"]) + 300 * p["w_part"]))
    u = w = s = torch.zeros_like(x[0])
    spikes = []
    for current in x:
        u = u_decay * u + (1 - u_decay) * (current + F.linear(s, p["recurrent.weight"]) - w)
        s = slayer(u - 1)
        u = u * (1 - s.detach())
        w = w_decay * w + (1 - w_decay) * (p["a"] * u + p["b"] * s) * 120
        spikes.append(s)
    return torch.stack(spikes)


PUBLISHED: dict[str, Callable[[Tensor, dict[str, Tensor]], Tensor]] = {
    "rlif": rlif,
    "radlif": radlif,
    "se_adlif": se_adlif,
}
# Currents at which each fires, and whose gradients reach every parameter.
SCALES = {"rlif": 8.0, "radlif": 8.0, "se_adlif": 12.0}


@pytest.mark.parametrize("cell", CELLS)
def test_equals_the_published_equations(cell: str) -> None:
    ours: RecurrentNeuron = made(CELLS[cell](CHANNELS, CONTEXT))
    parameters = {name: value.detach().clone().requires_grad_() for name, value in ours.named_parameters()}
    x = currents(SCALES[cell])
    copy = x.detach().clone().requires_grad_()
    spikes = ours(x)
    expected = PUBLISHED[cell](copy, parameters)
    assert torch.equal(spikes, expected) and 0.05 < spikes.mean() < 0.6
    assert (spikes.sum(0) > 1).any()  # so that recurrent weights and adaptation act
    weights = torch.randn(spikes.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    (spikes * weights).sum().backward()
    (expected * weights).sum().backward()
    assert x.grad is not None and x.grad.any() and (x.grad - copy.grad).abs().max() < 1e-12
    for name, value in ours.named_parameters():
        assert value.grad is not None and value.grad.any(), name
        assert (value.grad - parameters[name].grad).abs().max() < 1e-11, name


def test_starts_as_published() -> None:
    radlif = _of(64, RecurrentAdLIF)
    for name, low, high in (
        ("alpha", math.exp(-1 / 5), math.exp(-1 / 25)),
        ("beta", math.exp(-1 / 30), math.exp(-1 / 120)),
        ("a", -1, 1),
        ("b", 0, 2),
    ):
        value = getattr(radlif, name)
        assert low <= value.min() < value.max() <= high and value.max() - value.min() > 0.8 * (high - low), name
    weight = radlif.recurrent.weight
    assert not weight.diagonal().any()
    full = _of(64, SymplecticAdLIF).recurrent.weight
    assert full.diagonal().all() and torch.allclose(full @ full.T, torch.eye(64), atol=1e-5)


def _of(channels: int, kind: type[RecurrentNeuron]) -> Any:
    neuron = kind(channels, BuildContext(time_steps=STEPS))
    materialise([("neuron", neuron)], torch.device("cpu"), seed=3)
    return neuron


def test_values_outside_their_bounds_act_as_the_bounds() -> None:
    ours = made(RecurrentLIF(CHANNELS, CONTEXT))
    x = currents(8.0)
    with torch.no_grad():
        ours.alpha.fill_(2.0)
    spikes = ours(x)
    expected = rlif(x, {"recurrent.weight": ours.recurrent.weight, "alpha": torch.tensor(math.exp(-1 / 25)).double()})
    assert torch.equal(spikes, expected)
    spikes.sum().backward()
    assert not ours.alpha.grad.any()


@pytest.mark.parametrize(("start", "slope", "moves"), [(1.05, 1.0, True), (1.05, -1.0, False), (0.5, -1.0, True),
                                                        (-0.1, 1.0, False), (-0.1, -1.0, True)])  # fmt: skip
def test_a_gradient_leads_back_inside_the_bounds_only(start: float, slope: float, moves: bool) -> None:
    """As the authors' clamp after each update: u_part 1.05 returns if the loss falls with it."""
    ours = made(SymplecticAdLIF(CHANNELS, CONTEXT))
    with torch.no_grad():
        ours.a.fill_(start)
    (slope * ours.constants()["a"]).sum().backward()
    assert ours.a.grad.unique().tolist() == ([slope] if moves else [0.0])


def test_the_readout_is_a_leaky_integrator() -> None:
    for sums in (True, False):
        ours = made(LeakyReadout(CHANNELS, 4, CONTEXT, tau=7.0, sums_softmax=sums), "head")
        x = currents()
        u = torch.zeros(SAMPLES, 4, dtype=torch.float64)
        outputs = []
        for current in F.linear(x.detach(), ours.weight, ours.bias):
            u = math.exp(-1 / 7) * u + (1 - math.exp(-1 / 7)) * current
            outputs.append(STEPS * u.softmax(-1) if sums else u)
        assert (ours(x) - torch.stack(outputs)).abs().max() < 1e-12
    with pytest.raises(ValueError, match="--bptt-steps"):
        LeakyReadout(CHANNELS, 4, BuildContext(stateful=True))


def test_an_input_with_space_is_named() -> None:
    with pytest.raises(ValueError, match=r"\[T, N, C\], got \[12, 2, 6, 3, 3\]"):
        RecurrentLIF(CHANNELS, CONTEXT)(torch.empty(STEPS, 2, CHANNELS, 3, 3, device="meta"))


# --- a network of them


def network(cell: str) -> RecurrentAudio:
    """As published: with batch norm, but for SE-adLIF, whose second layer is silent at first."""
    is_normed = cell != "se_adlif"
    depth = 2 if is_normed else 1
    sizes = {"in_channels": 10, "time_steps": 32, "num_classes": 4, "width": 16}
    return RecurrentAudio(cell=cell, norm=is_normed, depth=depth, dropout=0.2, **sizes)


def batch_of(model: RecurrentAudio, samples: int = 5) -> tuple[Tensor, Tensor]:
    """Counts of spikes, whose rates last, so that the slow neurons behind them fire."""
    generator = torch.Generator().manual_seed(7)
    rates = torch.randint(0, 40, (samples, 1, model.in_channels), generator=generator)
    counts = rates + torch.randint(0, 3, (samples, *model.input_shape), generator=generator)
    return counts.double(), torch.arange(samples) % model.num_classes


LAYOUTS = [
    Layout(data=2),
    Layout(tensor=2),
    Layout(1, 1, 2, "zbv"),
    Layout(context=2),
    Layout(1, 2, 2, "zbv"),
    Layout(2, 1, 1, weight=2, recompute="always"),
]


@pytest.mark.parametrize("cell", CELLS)
def test_every_layout_computes_the_same(ranks, cell: str) -> None:
    model = network(cell)
    one = assert_equal_to_one(ranks, model, LAYOUTS, batch_of(model), micro_batch_size=3)
    gradients = assemble([one], "gradients")
    assert one.spikes > 10 and all(value.any() for value in gradients.values())
    diagonals = [value.diagonal() for name, value in gradients.items() if name.endswith("recurrent.weight")]
    assert all(bool(each.any()) == (cell == "se_adlif") for each in diagonals)


def test_neurons_and_the_first_layer_are_cut_by_channel() -> None:
    context = BuildContext(ParallelState.without_process_groups(Grid(tp=2)))
    named = dict(describe_model(network("radlif")).named_layers(context))
    assert named["linear.0"].weight.shape == (8, 10)
    assert named["neuron.1"].recurrent.weight.shape == (8, 16) and named["neuron.1"].beta.shape == (8,)


def test_recurrent_operations_are_counted_once_a_spike() -> None:
    model = replace(network("radlif"), dropout=0.0)
    inputs, labels = batch_of(model, 4)
    fired: list[float] = []
    with Engine(model, micro_batch_size=2, global_batch_size=4, train_iters=1, precision="fp64") as engine:
        neurons = dict(engine.distributed.neurons())
        neurons["neuron.0"].observer = lambda spikes: fired.append(float(spikes[:-1].sum()))
        operations = Operations(engine.distributed)
        with operations.counting():
            engine.evaluate(inputs, labels)
        found = {each.name: each for each in operations.of_sample(4)}["neuron.0.recurrent"]
    # A spike of any step but the last reaches all 16 neurons.
    assert found.effective_acs == 16 * sum(fired) / 4 > 0 and found.effective_macs == 0


def test_windows_in_time_continue_from_the_state() -> None:
    """One window after the other fires as all at once, without a gradient between them."""
    whole = made(SymplecticAdLIF(CHANNELS, CONTEXT))
    parts = made(SymplecticAdLIF(CHANNELS, replace(CONTEXT, stateful=True)))
    x = currents(12.0)
    expected = whole(x)
    for _ in range(2):
        windows = [parts(x[:7]), parts(x[7:])]
        assert torch.equal(torch.cat(windows), expected)
        parts.forget()
    (gradient,) = torch.autograd.grad(windows[1].sum(), x)
    assert not gradient[:7].any() and gradient[7:].any()
