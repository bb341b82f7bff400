"""Neurons of one's own, of the literature; tests/parity/test_networks.py compares two of them with SpikingJelly's, and
the others with one rank."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from megasnn.kernels.spike_codec import pack_ternary
from megasnn.layers import BuildContext, ConvNormNeuron, MeanLinear, ParallelPSN, SpikingNeuron
from megasnn.layers.layer import Layer, layer
from megasnn.layers.tensors import materialise
from megasnn.models.build import describe_model
from megasnn.models.model import Model
from megasnn.pipeline.chunk import build_chunks
from tests.models.networks import Integrates, between


class AdaptiveLIF(SpikingNeuron):
    """The threshold rises with every spike, by a learned step for each channel (Bellec et al., arXiv 1803.09574)."""

    def __init__(self, channels: int) -> None:
        super().__init__(channels, surrogate="triangular", alpha=2.0)
        self.per_channel("rise", 0.2)

    def start(self, x: Tensor) -> dict[str, Tensor]:
        return {"v": torch.zeros_like(x), "a": torch.zeros_like(x)}

    def charge(self, x: Tensor, state: dict[str, Tensor]) -> Tensor:
        return state["v"] + (x - state["v"]) / 2

    def fire(self, h: Tensor, state: dict[str, Tensor]) -> Tensor:
        return self.spike(h - 0.5 - self.of("rise", h) * state["a"])

    def reset(self, h: Tensor, spikes: Tensor, state: dict[str, Tensor]) -> dict[str, Tensor]:
        return {"v": h * (1 - spikes.detach()), "a": 0.9 * state["a"] + spikes}


class GatedLIF(SpikingNeuron):
    """Learned gates for each channel choose between leaks and between resets (after GLIF, arXiv 2210.13768)."""

    def __init__(self, channels: int) -> None:
        super().__init__(channels, surrogate="atan")

        def spread(tensor: Tensor, generator: torch.Generator) -> None:
            tensor.uniform_(-1, 1, generator=generator)

        for gate in ("leak", "decay", "hard"):
            self.per_channel(gate, spread)

    def charge(self, x: Tensor, state: dict[str, Tensor]) -> Tensor:
        leak, decay = (self.of(name, x).sigmoid() for name in ("leak", "decay"))
        return state["v"] * (1 - leak * decay) - 0.1 * (1 - leak) + x

    def reset(self, h: Tensor, spikes: Tensor, state: dict[str, Tensor]) -> dict[str, Tensor]:
        hard = self.of("hard", h).sigmoid()
        return {"v": hard * h * (1 - spikes) + (1 - hard) * (h - spikes)}


class PlainLIF(Integrates):
    """What `--neuron lif` is."""

    def charge(self, x: Tensor, state: dict[str, Tensor]) -> Tensor:
        return state["v"] + (x - state["v"]) / 2.0


class CountingLIF(PlainLIF):
    """Gives counts of spikes, up to 4 (integer LIF, arXiv 2407.20708), or, with a sign, ternary ones."""

    def __init__(self, channels: int, largest: int | None = 4, lowest: int = 0) -> None:
        SpikingNeuron.__init__(self, channels, largest=largest, lowest=lowest)

    def fire(self, h: Tensor, state: dict[str, Tensor]) -> Tensor:
        clipped = (2 * h).clamp(self.lowest, 4.0 if self.lowest == 0 else 1.0)
        return clipped + (clipped.round() - clipped).detach()  # straight through


class TernaryLIF(CountingLIF):
    def __init__(self, channels: int) -> None:
        super().__init__(channels, largest=1, lowest=-1)


class RoundingLIF(TernaryLIF):
    """Has no gradient; rounds small negative potentials to -0."""

    def fire(self, h: Tensor, state: dict[str, Tensor]) -> Tensor:
        return h.clamp(-1, 1).round()


NEURONS = {each.__name__: each for each in (AdaptiveLIF, GatedLIF, CountingLIF, TernaryLIF)}


@dataclass(frozen=True, kw_only=True)
class Own(Model):
    """Two units with neurons of one's own, and one alone."""

    image_size: int = 6
    time_steps: int = 4
    num_classes: int = 3
    kind: str = "AdaptiveLIF"

    def layers(self) -> Iterable[Layer]:
        made = NEURONS[self.kind]
        yield layer("a", ConvNormNeuron(3, 8, 3, neuron=made(8), max_pool=True))
        yield layer("b", ConvNormNeuron(8, 16, 3, neuron=made(16)))
        yield layer("alone", made(16))
        yield layer("head", MeanLinear(16, self.num_classes))


def test_its_spikes_travel_as_bits_and_its_parameters_are_described_by_channel() -> None:
    described = describe_model(Own())
    assert [each.entries[None].content.name for each in described.layers] == ["SPIKES", "SPIKES", "SPIKES", "DENSE"]
    built = dict(described.named_layers(BuildContext()))
    assert built["b"].conv.options.content.name == "SPIKES"
    materialise(built.items(), torch.device("cpu"), 0)
    assert torch.equal(built["alone"].rise, torch.full((16,), 0.2))
    ternary = describe_model(Own(kind="TernaryLIF"))
    assert [each.entries[None].content.name for each in ternary.layers] == ["TERNARY", "TERNARY", "TERNARY", "DENSE"]


def test_a_ternary_neuron_that_rounds_gives_no_negative_zero() -> None:
    spikes = RoundingLIF(3)(torch.tensor([-0.2, 0.2, -3.0]).view(1, 1, 3).expand(2, 1, 3))
    assert spikes[0].tolist() == [[0, 0, -1]] and not torch.signbit(spikes[spikes == 0]).any()
    pack_ternary(spikes, check=True)


def counting(largest: int | None) -> Model:
    return between(lambda: [layer("counts", CountingLIF(8, largest)), layer("after", ConvNormNeuron(8, 8))], width=8)


def test_what_a_neuron_gives_besides_spikes_it_says_and_otherwise_the_layer_is_named() -> None:
    def forward(largest: int | None) -> Tensor:
        described = describe_model(counting(largest))
        chunk = build_chunks(described, [range(4)], [0], BuildContext(), torch.device("cpu"), 0)[0]
        torch.nn.init.constant_(chunk.layers[0].norm.bias, 3.0)
        chunk.layers[0].neuron = torch.nn.Identity()  # potentials, so that several spikes come
        return chunk(torch.rand(2, 3, 4, 4, generator=torch.Generator().manual_seed(0)), range(2))

    with pytest.raises(ValueError, match="lowest=-1 with largest=4"):
        CountingLIF(8, 4, -1)
    contents = [describe_model(counting(largest)).layers[1].entries[None].content.name for largest in (4, None)]
    assert contents == ["COUNTS", "DENSE"] and torch.equal(forward(4), forward(None))
    with pytest.raises(ValueError, match="after: .*largest="):
        forward(1)


class Forgetful(PlainLIF):
    """What it starts with is not what it goes on from."""

    def __init__(self, channels: int, left: Any) -> None:
        super().__init__(channels)
        self.returned = left

    def reset(self, h: Tensor, spikes: Tensor, state: dict[str, Tensor]) -> Any:
        return self.returned


@pytest.mark.parametrize(("left", "why"), [({}, "in neuron: KeyError: 'v' .*test_own_neurons.py"), (None, "NoneType")])
def test_a_state_that_the_next_step_cannot_take_is_refused_before_anything_is_built(left: Any, why: str) -> None:
    model = between(lambda: [layer("unit", ConvNormNeuron(4, 4, neuron=Forgetful(4, left)))])
    with pytest.raises(ValueError, match=f"unit, given .*{why}"):
        describe_model(model)
    with pytest.raises(ValueError, match="'triangle'.*triangular"):
        SpikingNeuron.__init__(PlainLIF(4), 4, surrogate="triangle")


def test_neurons_are_listed_by_how_they_are_computed() -> None:
    mixed = describe_model(between(lambda: [layer("own", AdaptiveLIF(4)), layer("psn", ParallelPSN())]))
    assert (mixed.kernel_neurons, mixed.plain_neurons) == ({"lif"}, {"AdaptiveLIF", "ParallelPSN"})
