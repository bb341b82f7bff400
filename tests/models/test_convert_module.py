"""Networks of torch's and SpikingJelly's layers, given to `megasnn.shard`, beside themselves, on every layout."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial

import pytest
import torch
from spikingjelly.activation_based import layer as sj
from spikingjelly.activation_based import neuron
from torch import Tensor, nn

import megasnn
from megasnn.common.grid import Grid
from megasnn.layers import BuildContext, ConvNormNeuron, ParallelDropout, apply_layer
from megasnn.layers.layer import Layer, layer
from megasnn.layers.plain.table import CONVERSIONS
from megasnn.models.build import describe_model
from megasnn.models.model import Model
from megasnn.parallel_state import ParallelState
from tests.models import given_to_shard as networks
from tests.models.networks import between
from tests.parity.beside import Case, assert_equal_to_truth
from tests.parity.ranks import Layout, RankStep, assert_equal, one_step

WHOLE = replace(networks.CASES["rest"], counts=False)  # its votes do not divide by 8 ranks, which all have them
LARGE = [
    (networks.CASES["vgg"], Layout(1, 4, 2, "zbv")),
    (WHOLE, Layout(tensor=8)),
    pytest.param(networks.CASES["residual"], Layout(1, 4, 2, "zbv"), marks=pytest.mark.matrix),
]
"""With more tensor parallel ranks than in tests/parity/test_networks.py."""


@pytest.mark.parametrize(("case", "layout"), LARGE)
def test_many_tensor_parallel_ranks_compute_what_the_network_does(ranks, case: Case, layout: Layout) -> None:
    assert_equal_to_truth(case, ranks, layout)


def test_spikingjellys_dropout_drops_the_same_at_all_time_steps() -> None:
    x = torch.ones(3, 2, 4, 5, 5)
    for same in (True, False):
        y = apply_layer(ParallelDropout(0.5, "a", same_at_all_steps=same), x, range(2))
        assert torch.equal(y, y[:1].expand_as(y)) is same and 0.3 < (y == 0).float().mean() < 0.7


def test_a_report_says_what_each_layer_becomes_and_leaves_the_network_alone() -> None:
    net = networks.residual()
    before = {name: (type(module), module) for name, module in net.named_modules()}
    values = {name: value.clone() for name, value in net.state_dict().items()}
    report = told(net)
    assert report["stem.1"] == "ThresholdDependentBatchNorm2d  cut by channel"
    assert "cut by channel, if its own" in report["block"] and "whole on every rank: norm (GroupNorm)" in report["up"]
    assert {name: (type(module), module) for name, module in net.named_modules()} == before
    assert all(torch.equal(value, values[name]) for name, value in net.state_dict().items())
    with pytest.raises(ValueError, match="Conv2d"):
        megasnn.shard(nn.Conv2d)  # type: ignore[arg-type]


def told(net: nn.Module) -> dict[str, str]:
    return dict(line.split(maxsplit=1) for line in str(megasnn.shard(net)).splitlines())


class Twice(nn.Module):
    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        self.part = part

    def forward(self, x: Tensor) -> Tensor:
        return self.part(self.part(x))


class Filled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.scale = nn.Conv2d(3, 3, 1), nn.Parameter(torch.Tensor(1, 3, 1, 1))


MADE = nn.Conv2d(3, 4, 1)
REFUSED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "dropout": (lambda: nn.Dropout2d(0.1), "0, given .* draws"),
    "single step": (neuron.LIFNode, "0: LIFNode .* step mode 's'"),
    "neuron at two places": (lambda: nn.Sequential(*[neuron.IFNode(step_mode="m")] * 2), r"0\.1 is that of 0\.0"),
    "own norm": (lambda: sj.TemporalEffectiveBatchNorm2d(7, 3), "0: TemporalEff.* forward of its own"),
    "ours": (lambda: ConvNormNeuron(3, 4), r"0\.conv \(ParallelConv\)"),
    "neuron twice": (lambda: Twice(neuron.IFNode(step_mode="m")), "0, given .* twice"),
    "dropout twice": (lambda: Twice(sj.Dropout(0.1, step_mode="m")), "0, given .* twice"),
    "values": (lambda: MADE, r"0 \(Conv2d\) has values"),
    "values of a class": (Filled, r"0 \(Filled\) has values in 'scale'"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_what_cannot_be_cut_is_refused_with_name_and_reason(kind: str) -> None:
    @dataclass(frozen=True, kw_only=True)
    class Wrong(Model):
        image_size: int = 8
        time_steps: int = 2

        def layers(self) -> Iterable[Layer]:
            yield from megasnn.shard(nn.Sequential(REFUSED[kind][0]()))
            head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(3, self.num_classes))
            yield layer("head", megasnn.shard(head))

    with pytest.raises(ValueError, match=REFUSED[kind][1]):
        describe_model(Wrong()).build(BuildContext(ParallelState.without_process_groups(Grid(tp=2))))


def shared(cut: bool = True) -> list[Layer]:
    """A block that two layers have, and its weight once more; each layer given to shard, or plain."""
    conv, again = (sj.Conv2d(4, 4, 3, padding=1, bias=False, step_mode="m") for _ in range(2))
    again.weight = conv.weight
    block = nn.Sequential(conv, sj.BatchNorm2d(4, step_mode="m"), neuron.ParametricLIFNode(step_mode="m"))
    parts = {"a": block, "again": again, "b": block}
    return [layer(name, megasnn.shard(part) if cut else part) for name, part in parts.items()]


def _shared(cut: bool, layout: Layout) -> RankStep:
    return one_step(between(partial(shared, cut)), layout)


def test_shared_blocks_and_weights_stay_shared(ranks) -> None:
    one = ranks(1, _shared, False, Layout())
    for layout in (Layout(), Layout(tensor=2), Layout(tensor=2, pipeline=2)):
        assert_equal(ranks(layout.tensor * layout.pipeline, _shared, True, layout), one)


def test_a_network_with_a_forward_is_one_layer() -> None:
    with pytest.raises(ValueError, match="Twice has a forward of its own"):
        list(megasnn.shard(Twice(nn.Identity())))
    relu = nn.ReLU()  # at two places
    assert [each.name for each in megasnn.shard(nn.Sequential(relu, nn.Identity(), relu))] == ["0", "1", "2"]


def test_a_conversion_of_the_users_may_have_any_name(monkeypatch: pytest.MonkeyPatch) -> None:
    class OwnConv(nn.Conv3d):
        def __init__(self, conv: nn.Conv3d, context: BuildContext, initialise: object) -> None:
            super().__init__(conv.in_channels, conv.out_channels, 1)

    assert all(hasattr(nn, name) or hasattr(sj, name) or hasattr(neuron, name) for name in CONVERSIONS)
    monkeypatch.setitem(CONVERSIONS, "Conv3d", OwnConv)
    assert "cut by channel" in str(megasnn.shard(nn.Sequential(nn.Conv3d(3, 4, 1))))
