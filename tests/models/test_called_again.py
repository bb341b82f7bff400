"""Layers that one forward calls several times: what tests/parity/test_networks.py does not show of them."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor, nn

import megasnn
from megasnn.common.grid import Grid
from megasnn.kernels.spike_codec import Content
from megasnn.layers import BuildContext, ConvNormNeuron, ParallelBatchNorm, ParallelConv
from megasnn.layers.layer import Layer, layer
from megasnn.layers.plain.initial_values import without_memory
from megasnn.layers.tensors import materialise
from megasnn.models.build import describe_model
from megasnn.parallel.sync_batch_norm import RunningStatistics
from megasnn.parallel_state import Group, ParallelState
from tests.models.networks import between
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


def again(more: int = 0) -> list[Layer]:
    return [layer("block", Recurrent(4, more))]


def test_what_its_inputs_hold_is_learned_from_all_of_them() -> None:
    described = describe_model(between(again))
    assert dict(described.named_layers(BuildContext()))["block"].unit.conv.options.content is Content.COUNTS


def _called_twice(momentum: float | None = 0.1) -> ParallelBatchNorm:
    with without_memory():
        norm = ParallelBatchNorm(4, momentum=momentum)
        norm(norm(torch.empty(2, 3, 4, 5, 5)))
    materialise([("norm", norm)], torch.device("cpu"), 0)
    norm.record_statistics()
    return norm


@pytest.mark.parametrize("momentum", [0.3, None])
def test_a_norm_keeps_the_statistics_that_torchs_does(momentum: float | None) -> None:
    norm = _called_twice(momentum)
    theirs, x = nn.BatchNorm2d(4, momentum=momentum), torch.randn(2, 3, 4, 5, 5)
    for _ in range(2):
        norm(0.5 + 2 * norm(x))
        RunningStatistics([norm], Group("dp")).merge(1)
        theirs(0.5 + 2 * theirs(x.flatten(0, 1)))
    for name, value in theirs.state_dict().items():
        torch.testing.assert_close(norm.state_dict()[name], value)
    assert norm.num_batches_tracked == 4


def test_more_calls_than_in_the_dry_run_are_refused_in_the_first_step(ranks) -> None:
    with pytest.raises(RankError, match=r"weight of shape \[4, 4, 3, 3\] was called more often than in the dry run"):
        ranks(1, one_step, between(partial(again, 1)), Layout())
    norm = _called_twice()
    norm(torch.randn(2, 3, 4, 5, 5))
    with pytest.raises(ValueError, match=r"recorded \[1\] statistics, .* a forward calls them \[2\] times"):
        RunningStatistics([norm], Group("dp")).merge(1)


class Twice(nn.Module):
    """Calls a module on its own output, or on the sum of input and output."""

    def __init__(self, part: nn.Module, calls: int = 2) -> None:
        super().__init__()
        self.part, self.calls = part, calls

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(self.calls):
            x = self.part(x)
        return x


def calling(calls: int = 2) -> list[Layer]:
    """Layers that call a convolution, neurons, and a norm that two of them share."""
    norm = ParallelBatchNorm(4)
    parts = {"conv": Twice(ParallelConv(4, 4, 1)), "fire": Twice(megasnn.ParallelNeuron()), "a": Twice(norm)}
    return [layer(name, part) for name, part in (parts | {"b": Twice(norm, calls)}).items()]


def test_calls_that_differ_are_refused() -> None:
    described = describe_model(between(calling))
    assert described.ties and described.build(BuildContext())  # each call of a neuron starts at rest
    assert described.build(BuildContext(ParallelState.without_process_groups(Grid(tp=2))))
    with pytest.raises(ValueError, match="fire.* twice in one forward, .*--bptt-steps"):
        described.build(BuildContext(stateful=True))
    with pytest.raises(ValueError, match=r"b\.part\.running_mean .*a\.part\.running_mean.* 1 and 2 times"):
        describe_model(between(partial(calling, 1)))
