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
from megasnn.layers.init import without_memory
from megasnn.models.build import describe
from megasnn.models.layer import Layer, layer
from megasnn.models.model import Model
from megasnn.parallel.sharding import materialise
from megasnn.parallel.sync_batch_norm import merge_running_statistics
from megasnn.parallel_state import Group, alone
from tests.parity.ranks import Layout, one_step
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
        merge_running_statistics([norm], alone("dp"), 1)
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
        merge_running_statistics([norm], alone("dp"), 1)


class Twice(nn.Module):
    """Calls a module on its own output, or on the sum of input and output."""

    def __init__(self, part: nn.Module, calls: int = 2) -> None:
        super().__init__()
        self.part, self.calls = part, calls

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(self.calls):
            x = self.part(x)
        return x


@dataclass(frozen=True, kw_only=True)
class Calling(Model):
    """Layers that call a convolution on images, neurons, and a norm that two of them share."""

    in_channels: int = 2
    calls: int = 2

    def layers(self) -> Iterable[Layer]:
        norm = ParallelBatchNorm(2)
        yield layer("conv", Twice(ParallelConv(2, 2, 1)))
        yield layer("fire", Twice(megasnn.ParallelNeuron()))
        yield layer("a", Twice(norm))
        yield layer("b", Twice(norm, self.calls))
        yield layer("head", MeanLinear(2, self.num_classes))


def test_calls_that_differ_are_refused() -> None:
    described = describe(Calling())
    assert described.ties and described.build(BuildContext())  # each call of a neuron starts at rest
    assert described.build(BuildContext(Group("tp", (0, 1))))
    with pytest.raises(ValueError, match="fire.* twice in one forward, .*--bptt-steps"):
        described.build(BuildContext(carries=True))
    with pytest.raises(ValueError, match=r"b\.part is called 1 times .*a\.part, .* 2 times"):
        describe(Calling(calls=1))
