"""Neurons parallel in time equal SpikingJelly's; with integer LIF beside them, every layout equals one rank."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from spikingjelly.activation_based import neuron, surrogate
from torch import Tensor

from megasnn.kernels import NeuronSpec
from megasnn.kernels.spike_codec import bits_of, pack_bits
from megasnn.layers import (
    BuildContext,
    ConvNormNeuron,
    MeanLinear,
    Numerics,
    ParallelIF,
    ParallelMaskedPSN,
    ParallelPSN,
    ParallelSlidingPSN,
)
from megasnn.layers.layer import Layer, layer
from megasnn.layers.neuron import NeuronLayer, make_neuron
from megasnn.layers.tensors import materialise
from megasnn.models.build import describe_model
from megasnn.models.model import Model
from tests.kernels.models import channels_last, saved_tensors
from tests.parity.ranks import Layout, assemble, assert_equal_to_one

STEPS = 5
CONTEXT = BuildContext(numerics=Numerics(torch.float64, torch.float64), time_steps=STEPS)
COUNTS = NeuronSpec("ilif4", tau=4 / 3, v_reset=None, decay_input=False, detach_reset=False, v_threshold=0.5)


def with_values(made: NeuronLayer) -> NeuronLayer:
    materialise([("neuron", made)], torch.device("cpu"), seed=3)
    return made


def pair(kind: str, order: int = 2) -> tuple[NeuronLayer, Any]:
    """A layer of ours, and SpikingJelly's with its values, away from where they start."""
    theirs: Any
    ours: NeuronLayer
    if kind == "psn":
        theirs, ours = neuron.PSN(STEPS), ParallelPSN(context=CONTEXT)
    elif kind == "masked_psn":
        theirs = neuron.MaskedPSN(order, STEPS, lambda_init=1.0, step_mode="m")
        ours = ParallelMaskedPSN(context=CONTEXT, order=order)
    else:
        theirs = neuron.SlidingPSN(order, step_mode="m")
        ours = ParallelSlidingPSN(context=CONTEXT, order=order)
    theirs = theirs.double()
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter += 0.3 * torch.rand(parameter.shape, generator=torch.Generator().manual_seed(1)).double()
    with_values(ours).load_state_dict(dict(theirs.named_parameters()))
    return ours, theirs


def results(fire: Any, x: Tensor, parameters: Iterable[Tensor]) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Spikes, and gradients of a fixed function of them."""
    spikes = fire(x)
    return spikes, torch.autograd.grad((spikes * channels_last(*spikes.shape, seed=7)).sum(), [x, *parameters])


@pytest.mark.parametrize(("kind", "order"), [("psn", 0), ("sliding_psn", 1), ("sliding_psn", 3), ("sliding_psn", 9),
                                             ("masked_psn", 4)])  # fmt: skip
def test_equals_spikingjelly(kind: str, order: int) -> None:
    with torch.random.fork_rng(devices=[]):
        # SpikingJelly draws the first weights from the global generator: with some, hardly a neuron fires.
        torch.manual_seed(0)
        ours, theirs = pair(kind, order)
    frame = channels_last(1, 2, 7, 3, 4).requires_grad_()
    for x in (channels_last(STEPS, 2, 7, 3, 4).requires_grad_(), channels_last(STEPS, 2, 3).requires_grad_(), frame):
        spikes, found = results(ours, x, ours.parameters())
        expected, wanted = results(lambda each: theirs(each.expand(STEPS, *each.shape[1:])), x, theirs.parameters())
        assert torch.equal(spikes, expected) and 0.02 < spikes.mean() < 0.98
        assert all((mine - other).abs().max() < 1e-12 for mine, other in zip(found, wanted, strict=True))
        assert all(each.any() for each in found)


def test_starts_as_spikingjellys_and_keeps_its_input_alone() -> None:
    half = [NeuronSpec(kind, v_threshold=0.5) for kind in ("sliding_psn", "psn")]
    sliding, psn = (with_values(make_neuron(each, CONTEXT)) for each in half)
    assert sliding.weight.tolist() == neuron.SlidingPSN(2).weight.tolist() and sliding.bias.item() == -0.5
    assert ParallelSlidingPSN(order=4).weight.shape == (4,)
    assert psn.bias.shape == (STEPS, 1) and (psn.bias == -0.5).all()
    assert psn.weight.abs().max() <= STEPS**-0.5 < 1.5 * psn.weight.abs().max()
    x = channels_last(STEPS, 2, 8, 3, 3).requires_grad_()
    with saved_tensors() as saved:
        spikes = psn(x)
    assert sorted(size for _, size in saved) == [STEPS, STEPS**2, x.numel()]
    assert spikes.movedim(2, -1).is_contiguous() and torch.equal(bits_of(spikes), pack_bits(spikes))
    theirs, h = surrogate.Sigmoid(alpha=4.0), torch.addmm(psn.bias, psn.weight, x.flatten(1))
    expected = torch.autograd.grad(theirs(h).sum(), x)[0]
    assert (torch.autograd.grad(spikes.sum(), x)[0] - expected).abs().max() < 1e-12  # the surrogate of the description
    low = psn(x.detach().bfloat16())
    assert low.dtype == torch.bfloat16 and torch.equal(low, psn(x.detach().bfloat16().float()).bfloat16())


def test_needs_all_time_steps() -> None:
    for make in (ParallelPSN, ParallelSlidingPSN):
        with pytest.raises(ValueError, match="--bptt-steps"):
            make(context=BuildContext(time_steps=4, stateful=True))
    with pytest.raises(ValueError, match="'if'.*'lif'"):
        ParallelIF(NeuronSpec(kind="lif"), BuildContext())
    with pytest.raises(ValueError, match="5 time steps.*4"):
        ParallelPSN(context=CONTEXT)(torch.empty(4, 2, 3, device="meta"))


@dataclass(frozen=True, kw_only=True)
class Mixed(Model):
    """Units with parallel neurons and one that counts, and a parallel neuron alone."""

    image_size: int = 8
    time_steps: int = STEPS
    num_classes: int = 3

    def layers(self) -> Iterable[Layer]:
        psn, sliding = (NeuronSpec(kind, v_threshold=0.3, surrogate="atan") for kind in ("psn", "sliding_psn"))
        masked = ParallelMaskedPSN(psn, order=2)
        yield layer("psn", ConvNormNeuron(3, 8, 3, neuron=psn))
        yield layer("counts", ConvNormNeuron(8, 8, 3, neuron=COUNTS, max_pool=True))
        yield layer("sliding", ConvNormNeuron(8, 16, 3, neuron=sliding, max_pool=True))
        yield layer("alone", make_neuron(psn))
        yield layer("masked", ConvNormNeuron(16, 16, neuron=masked))
        yield layer("head", MeanLinear(16, self.num_classes))


LAYOUTS = [
    Layout(tensor=2),
    Layout(1, 1, 2, "zbv"),
    Layout(context=2),
    Layout(context=2, cut="rows"),
    Layout(2, 1, 1, weight=2, recompute="always"),
]


def test_every_layout_computes_the_same(ranks) -> None:
    one = assert_equal_to_one(ranks, Mixed(), LAYOUTS, micro_batch_size=3)
    assert one.spikes > 100 and all(value.any() for value in assemble([one], "gradients").values())


def test_counts_travel_as_bytes_and_spikes_as_bits() -> None:
    contents = [next(iter(each.entries.values())).content.value for each in describe_model(Mixed()).layers]
    assert contents == ["spikes", "counts", "spikes", "spikes", "spikes", "dense"]
