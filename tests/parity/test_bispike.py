"""A model of tokens with ternary spikes: every layout computes one rank's step, and spikes take two bits."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from megasnn.kernels import NeuronSpec
from megasnn.kernels.spike_codec import TERNARY, pack_ternary
from megasnn.layers import MeanLinear, ParallelBatchNorm, ParallelConv
from megasnn.layers.layer import Layer, layer
from megasnn.layers.neuron import make_neuron
from megasnn.layers.shape_inference import BoundsInference, mark_spikes
from megasnn.layers.tensors import materialise
from megasnn.models.build import describe_model
from megasnn.models.model import Model
from megasnn.parallel.traffic import traffic
from megasnn.pipeline.p2p import TensorSpec
from tests.kernels.models import saved_tensors
from tests.parity.ranks import Layout, assemble, assert_equal_to_one, one_step

TOKENS = 8


class Unit(nn.Module):
    """A product of tokens, with a norm before the neuron."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.product = ParallelConv(inputs, outputs, 1, dims=1, bias=True)
        self.norm = ParallelBatchNorm(outputs)
        self.neuron = make_neuron(NeuronSpec("bispike", v_threshold=0.8))

    def forward(self, x: Tensor) -> Tensor:
        return self.neuron(self.norm(self.product(x)))


@dataclass(frozen=True, kw_only=True)
class Tokens(Model):
    time_steps: int = 4
    num_classes: int = 3

    @property
    def input_shape(self) -> tuple[int, ...]:
        return 3, TOKENS

    def layers(self) -> Iterable[Layer]:
        yield layer("first", Unit(3, 16))
        yield layer("wide", Unit(16, 64))
        yield layer("narrow", Unit(64, 16))  # by rows, which sums the outputs of the ranks
        yield layer("last", Unit(16, 16))
        yield layer("head", MeanLinear(16, self.num_classes))


LAYOUTS = [
    Layout(tensor=2),
    Layout(1, 1, 2, "zbv"),
    Layout(context=2),
    Layout(2, 1, 1, weight=2, recompute="always"),
    Layout(1, 2, 2, recompute="always"),
]


def test_every_layout_computes_the_same(ranks) -> None:
    one = assert_equal_to_one(ranks, Tokens(), LAYOUTS, micro_batch_size=3)
    assert abs(one.spikes) > 100 and all(value.any() for value in assemble([one], "gradients").values())
    contents = [each.entries[None].content for each in describe_model(Tokens()).layers]
    assert contents == [TERNARY] * 4 + [contents[-1]]


def bytes_sent(layout: Layout) -> list[tuple[str, str, float]]:
    """(group, phase, bytes in float32 for each byte) of what carries activations forward."""
    traffic.reset()
    with traffic.counting():
        one_step(Tokens(), layout, torch.float32)
    carrying = {"message", "all-gather"}
    found = [
        (key.group, key.phase, each.dense_bytes / each.bytes)
        for key, each in traffic.counts.items()
        if key.group in ("pp", "tp") and key.operation in carrying and key.phase == "forward"
    ]
    traffic.reset()
    return found


def test_messages_are_a_sixteenth_of_float32(ranks) -> None:
    assert ranks(2, bytes_sent, Layout(pipeline=2))[0] == [("pp", "forward", 16.0)]
    assert ranks(2, bytes_sent, Layout(tensor=2))[0] == [("tp", "forward", 16.0)]
    spikes = torch.randint(-1, 2, (4, 2, 16, TOKENS)).float()
    spec = TensorSpec(tuple(spikes.shape), spikes.dtype, TERNARY)
    message = spec.pack(spikes)
    assert 16 * message.nbytes == spikes.nbytes and spec.buffer(torch.device("cpu")).shape == message.shape
    assert torch.equal(spec.unpack(message), spikes)


def test_a_product_keeps_a_sixteenth_of_its_input() -> None:
    product = ParallelConv(16, 24, 1, dims=1)
    with BoundsInference():
        product(mark_spikes(torch.empty(4, 2, 16, TOKENS, device="meta"), lowest=-1))
    materialise([("product", product)], torch.device("cpu"), 0)
    spikes = torch.randint(-1, 2, (4, 2, TOKENS, 16)).float().movedim(-1, 2).requires_grad_()
    with saved_tensors() as saved:
        y = product(spikes)
    assert sorted(saved, key=str) == [(torch.float32, 24 * 16), (torch.uint8, spikes.numel() // 4)]
    upstream = torch.rand(y.shape, generator=torch.Generator().manual_seed(0))
    y.backward(upstream)
    wanted = torch.einsum("tnol,tnil->oi", upstream, spikes.detach())
    assert torch.allclose(product.weight.grad[..., 0], wanted, rtol=1e-5, atol=1e-5)
    assert pack_ternary(spikes).nbytes * 16 == spikes.nbytes
