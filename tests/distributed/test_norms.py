"""Norms of the literature cut over channels, against SpikingJelly's and torch's in float64."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from spikingjelly.activation_based import functional
from spikingjelly.activation_based import layer as sj
from torch import Tensor, nn

from megasnn.kernels import NeuronSpec
from megasnn.layers import (
    BuildContext,
    ConvNormNeuron,
    ParallelBatchNorm,
    ParallelGroupNorm,
    ParallelLayerNorm,
    TemporalEffectiveBatchNorm,
    ThresholdDependentBatchNorm,
)
from megasnn.parallel.collectives import all_reduce_sum
from megasnn.parallel.sync_batch_norm import merge_running_statistics
from megasnn.parallel_state import Group, alone
from tests.distributed.whole import assemble, build, channels_last, context, everybody, mine, parts, random

T, N, C = 3, 5, 8
CLOSE = dict(rtol=1e-11, atol=1e-11)


@dataclass(frozen=True)
class Case:
    """
    Attributes:
        ours: makes the layer. theirs: makes the reference, on `[T, N, C, *space]`.
    """

    ours: Callable[[BuildContext], nn.Module]
    theirs: Callable[[], nn.Module]
    space: tuple[int, ...] = (3, 4)
    frames: tuple[int, int] = (T, N)


def _on_frames(norm: nn.Module) -> nn.Module:
    return sj.SeqToANNContainer(norm)


CASES: dict[str, Case] = {
    "tdbn": Case(
        lambda c: ThresholdDependentBatchNorm(C, 0.7, 1.3, c, momentum=0.2),
        lambda: sj.ThresholdDependentBatchNorm2d(0.7, 1.3, C, momentum=0.2),
    ),
    "tdbn of signals": Case(
        lambda c: ThresholdDependentBatchNorm(C, context=c), lambda: sj.ThresholdDependentBatchNorm1d(1.0, 1.0, C), (6,)
    ),
    "tebn": Case(lambda c: TemporalEffectiveBatchNorm(C, c), lambda: sj.TemporalEffectiveBatchNorm2d(T, C)),
    "tebn without weights": Case(
        lambda c: TemporalEffectiveBatchNorm(C, c, affine=False, momentum=None),
        lambda: sj.TemporalEffectiveBatchNorm1d(T, C, affine=False, momentum=None),
        (6,),
    ),
    "groups": Case(lambda c: ParallelGroupNorm(4, C, c, eps=1e-3), lambda: _on_frames(nn.GroupNorm(4, C, 1e-3))),
    "groups of one frame": Case(
        lambda c: ParallelGroupNorm(4, C, c), lambda: _on_frames(nn.GroupNorm(4, C)), frames=(1, 1)
    ),
    "instances": Case(lambda c: ParallelGroupNorm(C, C, c), lambda: _on_frames(nn.InstanceNorm2d(C, affine=True))),
    "layer": Case(lambda c: ParallelLayerNorm((C, 3, 4), c), lambda: nn.LayerNorm([C, 3, 4])),
    "layer of features": Case(lambda c: ParallelLayerNorm(C, c, bias=False), lambda: nn.LayerNorm(C, bias=False), ()),
    "layer without weights": Case(
        lambda c: ParallelLayerNorm((C, 6), c, affine=False, eps=1e-3),
        lambda: nn.LayerNorm([C, 6], 1e-3, elementwise_affine=False),
        (6,),
    ),
}


def _input(one: Case) -> Tensor:
    return random(*one.frames, C, *one.space, seed=5) * 3 + torch.linspace(-2, 5, C).view(-1, *[1] * len(one.space))


def _values(norm: nn.Module) -> dict[str, Tensor]:
    named = [(name.split(".")[-1], value) for name, value in norm.named_parameters()]
    return {name: random(*value.shape, seed=20 + index) + 1 for index, (name, value) in enumerate(named)}


def _cut(name: str) -> list:
    group, one = everybody(), CASES[name]
    norm: Any = one.ours(replace(context(group), time_steps=T))
    tensors = build({"norm": norm}, {f"norm.{key}": value for key, value in _values(one.theirs()).items()})
    norm.recording = True
    x = channels_last(mine(_input(one), group)).requires_grad_()
    y = norm(x)
    (y * mine(random(*_input(one).shape, seed=60), group)).sum().backward()
    for each in tensors:
        if each.shard.partial_gradient:
            all_reduce_sum(each.tensor.grad, group, "backward")
    if isinstance(norm, ParallelBatchNorm):
        merge_running_statistics([norm], alone("data"), 1)
    norm.eval()
    outputs = {"y": y.detach(), "x": x.grad, "evaluated": norm(channels_last(mine(_input(one) + 1, group))).detach()}
    at = (0, 0, group.rank * C // group.size, *[0] * len(one.space))
    found = [(what, tuple(_input(one).shape), [(at, value)]) for what, value in outputs.items()]
    return found + parts(tensors) + [(f"grad {name}", *rest) for name, *rest in parts(tensors, gradients=True)]


def _truth(one: Case) -> dict[str, Tensor]:
    norm = one.theirs().double()
    with torch.no_grad():
        for (_, parameter), value in zip(norm.named_parameters(), _values(norm).values(), strict=True):
            parameter.copy_(value)
    x = _input(one).requires_grad_()
    y = norm(x)
    (y * random(*x.shape, seed=60)).sum().backward()
    found = {"y": y.detach(), "x": x.grad}
    norm.eval()
    found["evaluated"] = norm(_input(one) + 1).detach()
    found |= {f"norm.{name.split('.')[-1]}": value for name, value in norm.state_dict().items()}
    return found | {f"grad norm.{name.split('.')[-1]}": p.grad for name, p in norm.named_parameters()}


def _all_cut() -> list:
    return [_cut(name) for name in CASES]


@pytest.mark.parametrize("size", [1, 2, 4])
def test_every_norm_against_spikingjellys_or_torchs(ranks, size: int) -> None:
    everyone = ranks(size, _all_cut)
    for index, (name, one) in enumerate(CASES.items()):
        expected, found = _truth(one), assemble([rank[index] for rank in everyone])
        assert found.keys() == expected.keys(), name
        for what, value in expected.items():
            torch.testing.assert_close(found[what], value, **CLOSE, msg=lambda text, at=(name, what): f"{at}: {text}")


def _replica() -> dict[str, Tensor]:
    group = everybody("data")
    norms = {
        "td": ThresholdDependentBatchNorm(C, context=context(alone("tensor"))),
        "te": TemporalEffectiveBatchNorm(C, replace(context(alone("tensor")), time_steps=T)),
    }
    tensors = build(norms, {})
    for norm in norms.values():
        norm.recording = True
        norm(_input(CASES["tdbn"])[:, 2 * group.rank : 2 * group.rank + 3 - group.rank])
    merge_running_statistics(list(norms.values()), group, 1)
    return {each.name: each.tensor.clone() for each in tensors if not each.is_parameter}


def test_statistics_of_replicas_are_those_of_the_whole_batch(ranks) -> None:
    first, second = ranks(2, _replica)
    x = _input(CASES["tdbn"])
    values = torch.cat([x[:, :3], x[:, 2:4]], dim=1)
    for name, norm in (("td", sj.ThresholdDependentBatchNorm2d(1.0, 1.0, C)), ("te", sj.BatchNorm2d(C))):
        functional.set_step_mode(norm, "m")
        norm.double()(values)
        for buffer, value in norm.named_buffers():
            torch.testing.assert_close(first[f"{name}.{buffer}"], value, **CLOSE)
            assert torch.equal(first[f"{name}.{buffer}"], second[f"{name}.{buffer}"])


def test_initial_weights_are_at_the_threshold() -> None:
    norm = ThresholdDependentBatchNorm(C, 0.5, 3.0)
    build({"norm": norm}, {})
    assert torch.equal(norm.weight, torch.full((C,), 1.5))


@pytest.mark.parametrize("kind", ["tdbn", "tebn", "groups"])
def test_a_unit_takes_another_norm(kind: str) -> None:
    """The same as the parts one after another; an image of a single time step comes at every step."""
    options = replace(context(alone("tensor")), time_steps=T)
    norm = CASES[kind].ours(options)
    unit = ConvNormNeuron(C, C, 3, options, norm=norm, neuron=NeuronSpec())
    build({"unit": unit}, {f"unit.norm.{name}": value for name, value in _values(CASES[kind].theirs()).items()})
    x = _input(CASES[kind])[:1]
    spikes = unit(x)
    parts_of_it = unit.neuron(norm(unit.conv(x.expand(T, *x.shape[1:]))))
    assert torch.equal(spikes, parts_of_it) and 0.05 < spikes.mean() < 0.95


FOUR = Group("tensor", (0, 1, 2, 3))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ParallelGroupNorm(2, C, context(FOUR)), "groups 2 .* 8 channels .*--tensor-model-parallel-size 4"),
        (lambda: ParallelGroupNorm(3, C), "groups 3 .* must divide its 8 channels"),
        (
            lambda: ParallelLayerNorm((6, 3), context(FOUR)),
            "6 channels of a layer norm .*--tensor-model-parallel-size 4",
        ),
        (lambda: ParallelLayerNorm((C, 3))(torch.zeros(1, 1, 3, C)), r"over \[8, 3\].* is given \[1, 1, 3, 8\]"),
        (lambda: TemporalEffectiveBatchNorm(C)(torch.zeros(2, 1, C, 3)), "factors for 1 time steps, and is given 2"),
        (lambda: ParallelBatchNorm(C)(torch.zeros(1, 2, 4, 3, device="meta")), "batch norm of 8 channels, .* given 4"),
    ],
)
def test_what_does_not_fit_is_refused(make: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()
