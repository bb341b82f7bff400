"""Layers that one forward calls several times: what tests/parity/test_networks.py does not show of them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn

import megasnn
from megasnn.kernels.spike_codec import Content
from megasnn.layers import BuildContext, ConvNormNeuron, MeanLinear, ParallelBatchNorm, ParallelConv
from megasnn.layers.own_values import without_memory
from megasnn.models.building import describe
from megasnn.models.layer import Layer, layer
from megasnn.models.model import Model
from megasnn.parallel.sharding import materialise
from megasnn.parallel.sync_batch_norm import merge_running_statistics
from megasnn.parallel_state import Group, alone
from tests.models.steps import one_step
from tests.parity.ranks import Layout
from tools.benchmark.ranks import RankError


class Recurrent(nn.Module):
    """A unit on what it gives, or another number of times when it trains than in the dry run.

    Args:
        more: calls besides, where tensors have values.
    """

    def __init__(self, width: int, more: int = 0) -> None:
        super().__init__()
        self.unit, self.more = ConvNormNeuron(width, width, 3), more

    def forward(self, x: Tensor) -> Tensor:
        y = self.unit(x + self.unit(x))
        for _ in range(0 if x.is_meta else self.more):
            y = y + self.unit(x)
        return y


@dataclass(frozen=True, kw_only=True)
class Again(Model):
    image_size: int = 6
    time_steps: int = 2
    num_classes: int = 3
    more: int = 0

    def layers(self) -> Iterable[Layer]:
        yield layer("stem", ConvNormNeuron(3, 4, 3))
        yield layer("block", Recurrent(4, self.more))
        yield layer("head", MeanLinear(4, self.num_classes))


def test_what_its_inputs_hold_is_learned_from_all_of_them() -> None:
    described = describe(Again())
    assert dict(described.named_layers(BuildContext()))["block"].unit.conv.plan.content is Content.COUNTS


@pytest.mark.parametrize("momentum", [0.3, None])
def test_a_norm_keeps_the_statistics_that_torchs_does(momentum: float | None) -> None:
    with without_memory():
        norm = ParallelBatchNorm(4, momentum=momentum)
        norm(norm(torch.empty(2, 3, 4, 5, 5)))
    materialise([("norm", norm)], torch.device("cpu"), 0)
    theirs, x = nn.BatchNorm2d(4, momentum=momentum), torch.randn(2, 3, 4, 5, 5)
    norm.recording = True
    for _ in range(2):
        norm(0.5 + 2 * norm(x))
        merge_running_statistics([norm], alone("data"), 1)
        theirs(0.5 + 2 * theirs(x.flatten(0, 1)))
    for name, value in theirs.state_dict().items():
        torch.testing.assert_close(norm.state_dict()[name], value)
    assert norm.num_batches_tracked == 4


def test_more_calls_than_in_the_dry_run_are_refused_in_the_first_step(ranks) -> None:
    with pytest.raises(RankError, match=r"weight of shape \[4, 4, 3, 3\] was called more often than in the dry run"):
        ranks(1, one_step, Again(more=1), Layout())
    with without_memory():
        norm = ParallelBatchNorm(4)
        norm(norm(torch.empty(2, 3, 4, 5, 5)))
    materialise([("norm", norm)], torch.device("cpu"), 0)
    norm.recording = True
    norm(torch.randn(2, 3, 4, 5, 5))
    with pytest.raises(ValueError, match=r"recorded \[1\] statistics, .* a forward calls them \[2\] times"):
        merge_running_statistics([norm], alone("data"), 1)


class Whole(nn.Module):
    """A convolution on images, which every rank has whole, and on its own channels."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = ParallelConv(2, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(self.conv(x))


@dataclass(frozen=True, kw_only=True)
class OnImages(Model):
    in_channels: int = 2

    def layers(self) -> Iterable[Layer]:
        yield layer("stem", Whole())
        yield layer("fire", megasnn.ParallelLIF())
        yield layer("head", MeanLinear(2, self.num_classes))


def test_a_whole_and_a_cut_input_of_one_layer_are_refused() -> None:
    described = describe(OnImages())
    with pytest.raises(ValueError, match=r"in conv: it is called again, and of the two inputs .* has only one whole"):
        described.build(BuildContext(Group("tensor", (0, 1))))


def test_neurons_that_carry_are_called_once() -> None:
    class Neurons(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.neuron = megasnn.ParallelLIF()

        def forward(self, x: Tensor) -> Tensor:
            return self.neuron(x + self.neuron(x))

    @dataclass(frozen=True, kw_only=True)
    class Carrying(Model):
        def layers(self) -> Iterable[Layer]:
            yield layer("stem", Neurons())
            yield layer("head", MeanLinear(3, self.num_classes))

    described = describe(Carrying())  # each call starts at rest
    with pytest.raises(ValueError, match="is called twice in one forward, and with --bptt-steps it goes on from what"):
        described.build(BuildContext(carries=True))


class Normed(nn.Module):
    def __init__(self, norm: ParallelBatchNorm, calls: int) -> None:
        super().__init__()
        self.norm, self.calls = norm, calls

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(self.calls):
            x = self.norm(x)
        return x


def test_layers_that_share_a_norm_call_it_as_often() -> None:
    @dataclass(frozen=True, kw_only=True)
    class Shared(Model):
        calls: int = 2

        def layers(self) -> Iterable[Layer]:
            norm = ParallelBatchNorm(4)
            yield layer("stem", ConvNormNeuron(3, 4))
            yield layer("a", Normed(norm, 2))
            yield layer("b", Normed(norm, self.calls))
            yield layer("head", MeanLinear(4, self.num_classes))

    assert describe(Shared()).ties
    with pytest.raises(ValueError, match=r"b\.norm is called 1 times in a forward, and a\.norm, .* copy, 2 times: let"):
        describe(Shared(calls=1))
