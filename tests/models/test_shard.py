"""Networks of torch's and SpikingJelly's layers, given to `megasnn.shard`, beside themselves, on every layout."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

import pytest
import torch
from spikingjelly.activation_based import layer as sj
from spikingjelly.activation_based import neuron
from torch import Tensor, nn

import megasnn
from megasnn.layers import BuildContext, ConvNormNeuron, ParallelDropout
from megasnn.layers.swapped import SWAPS
from megasnn.models.building import describe
from megasnn.models.layer import Layer, layer
from megasnn.models.model import Model
from megasnn.parallel_state import Group
from tests.models import given_to_shard as networks
from tests.models import steps
from tests.models.networks import TwoTied
from tests.parity.beside import Case, assert_equal_to_truth
from tests.parity.ranks import Layout
from tests.parity.test_layouts import name_of

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


@pytest.mark.parametrize("layout", [Layout(tensor=2), Layout(1, 2, 2)], ids=name_of)
def test_dropout_draws_by_sample(ranks, layout: Layout) -> None:
    one = ranks(1, steps.one_step, networks.Dropping(), Layout())
    steps.assert_equal(ranks(layout.world_size, steps.one_step, networks.Dropping(), layout), one)


def test_spikingjellys_dropout_drops_the_same_at_all_time_steps() -> None:
    x = torch.ones(3, 2, 4, 5, 5)
    for same in (True, False):
        y = ParallelDropout(0.5, "a", same_at_all_steps=same)(x, range(2))
        assert torch.equal(y, y[:1].expand_as(y)) is same and 0.3 < (y == 0).float().mean() < 0.7


def test_a_report_says_what_each_layer_becomes_and_leaves_the_network_alone() -> None:
    net = networks.residual()
    before = {name: (type(module), module) for name, module in net.named_modules()}
    values = {name: value.clone() for name, value in net.state_dict().items()}
    lines = str(megasnn.shard(net)).splitlines()
    assert "stem.1            ThresholdDependentBatchNorm2d  ParallelBatchNorm, cut by channel" in lines
    assert any(
        line.startswith("block.down") and line.endswith("ParallelConv, cut by channel, column") for line in lines
    )
    whole = next(line for line in lines if "ConvTranspose2d" in line)
    assert "block.up" in whole and "whole on every rank: it has tensors of its own, and is not in the table" in whole
    assert {name: (type(module), module) for name, module in net.named_modules()} == before
    assert all(torch.equal(value, values[name]) for name, value in net.state_dict().items())
    refused = nn.Sequential(nn.Conv2d(3, 4, 1), nn.Dropout2d(0.1))
    assert "1  Dropout2d  refused: it draws random numbers" in str(megasnn.shard(refused))


class Twice(nn.Module):
    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        self.part = part

    def forward(self, x: Tensor) -> Tensor:
        return self.part(self.part(x))


class Mixing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = sj.Conv2d(3, 4, 1, step_mode="m")

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv(x)
        return y * y.mean(2, keepdim=True)


REFUSED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "dropout": (lambda: nn.Sequential(nn.Dropout2d(0.1)), r"0 \(Dropout2d\): .* draws random numbers"),
    "lazy": (lambda: nn.Sequential(nn.LazyConv2d(4, 1)), r"0 \(LazyConv2d\) does not say its sizes"),
    "single step": (lambda: nn.Sequential(neuron.LIFNode()), r"0 \(LIFNode\): .* step mode 's'"),
    "statistics": (
        lambda: nn.Sequential(nn.InstanceNorm2d(3, track_running_stats=True)),
        r"0 \(InstanceNorm2d\): .* keeps statistics of its own",
    ),
    "indices": (lambda: nn.Sequential(nn.MaxPool2d(2, return_indices=True)), r"\(MaxPool2d\): .* returns indices"),
    "tied": (lambda: nn.Sequential(TwoTied(3)), r"refuses 0\.b \(Conv2d\): its weight is that of 0\.a\.weight"),
    "steps": (
        lambda: nn.Sequential(sj.MultiStepContainer(sj.BatchNorm2d(3))),
        r"0 \(MultiStepContainer\): .* batch norm in it has the statistics of one time step",
    ),
    "time steps": (
        lambda: nn.Sequential(sj.TemporalEffectiveBatchNorm2d(7, 3)),
        r"0 \(TemporalEffectiveBatchNorm2d\): .* 7 time steps, the model 2; set --time-steps",
    ),
    "ours": (
        lambda: nn.Sequential(nn.Conv2d(3, 4, 1), ConvNormNeuron(4, 4)),
        r"1\.conv is a ParallelConv, cut already",
    ),
    "own forward": (Mixing, r"Mixing has a forward of its own, .* and is one layer: yield layer\("),
    "neuron twice": (
        lambda: nn.Sequential(Twice(neuron.IFNode(step_mode="m"))),
        "0, given .* is called twice in one forward, and SpikingJelly's would go on .*: give each call a neuron",
    ),
    "dropout twice": (
        lambda: nn.Sequential(Twice(sj.Dropout(0.1, step_mode="m"))),
        "0, given .* would draw the same both",
    ),
    "dropout of images": (
        lambda: nn.Sequential(nn.Identity(), nn.Dropout(0.1), nn.Conv2d(3, 4, 1)),
        "1, given .* whole on every rank: with --tensor-model-parallel-size 2",
    ),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_what_cannot_be_cut_is_refused_with_name_and_reason(kind: str) -> None:
    @dataclass(frozen=True, kw_only=True)
    class Wrong(Model):
        image_size: int = 8
        time_steps: int = 2
        num_classes: int = 10

        def layers(self) -> Iterable[Layer]:
            yield from megasnn.shard(REFUSED[kind][0]())
            head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, self.num_classes))
            yield layer("head", megasnn.shard(head))

    with pytest.raises(ValueError, match=REFUSED[kind][1]):
        describe(Wrong()).build(BuildContext(Group("tensor", (0, 1))))


MADE = nn.Sequential(nn.Conv2d(3, 4, 1))


def test_a_network_with_values_is_refused_in_layers_and_one_in_two_layers_too() -> None:
    @dataclass(frozen=True, kw_only=True)
    class Wrong(Model):
        made: bool = True

        def layers(self) -> Iterable[Layer]:
            yield from megasnn.shard(MADE if self.made else nn.Sequential())
            conv = nn.Conv2d(3, 3, 1)
            yield layer("a", megasnn.shard(conv))
            yield layer("b", megasnn.shard(nn.Sequential(conv)))

    with pytest.raises(ValueError, match="0.weight of Conv2d has values: make modules in `layers`.*--load"):
        describe(Wrong())
    with pytest.raises(
        ValueError, match="b and a are made of the same SwappedConv by megasnn.shard; give it to shard once"
    ):
        describe(Wrong(made=False))


class Attends(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 2, dropout=0.1)


class Filled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.scale = nn.Conv2d(3, 3, 1), nn.Parameter(torch.Tensor(1, 3, 1, 1))


def test_what_draws_is_refused_in_the_report_too() -> None:
    lines = str(megasnn.shard(nn.Sequential(nn.RReLU(), nn.Sequential(Attends()), Filled()))).splitlines()
    assert "refused: it draws random numbers that depend on the layout: use LeakyReLU" in lines[0]
    assert any(line.startswith("1.0.attention") and "refused" in line and "dropout=0" in line for line in lines)
    assert "refused: self_attn (MultiheadAttention) draws" in str(megasnn.shard(nn.TransformerEncoderLayer(4, 2)))
    with pytest.raises(
        ValueError, match=r"megasnn\.shard is given the class Conv2d: give it a module, Conv2d\(\.\.\.\)"
    ):
        megasnn.shard(nn.Conv2d)  # type: ignore[arg-type]


@pytest.mark.parametrize("sharded", [True, False])
def test_a_tensor_made_by_the_class_tensor_is_named(sharded: bool) -> None:
    @dataclass(frozen=True, kw_only=True)
    class Wrong(Model):
        def layers(self) -> Iterable[Layer]:
            net = nn.Sequential(Filled())
            yield layer("stem", megasnn.shard(net) if sharded else net)

    with pytest.raises(ValueError, match=r"stem: 0\.scale of Filled has values: .*torch\.empty, because torch\.Tensor"):
        describe(Wrong())


class OwnConv(nn.Conv3d):
    """A swap for what the table lacks; of another name than ours."""

    def __init__(self, conv: nn.Conv3d, context: BuildContext, initialise: object) -> None:
        super().__init__(conv.in_channels, conv.out_channels, 1)


def test_a_swap_of_the_users_may_have_any_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SWAPS, "Conv3d", OwnConv)
    assert "OwnConv, cut by channel" in str(megasnn.shard(nn.Sequential(nn.Conv3d(3, 4, 1))))


def test_the_table_knows_classes_that_exist() -> None:
    assert all(hasattr(nn, name) or hasattr(sj, name) or hasattr(neuron, name) for name in SWAPS)
