"""Backward in two parts: the sum of both has the bits of backward in one, and the second one needs no other rank."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from megasnn.layers import (
    BuildContext,
    Numerics,
    ParallelConv,
    ParallelLinear,
    SpikingSelfAttention,
)
from megasnn.layers.init import trunc_normal
from megasnn.layers.shape_inference import mark_spikes
from megasnn.layers.weight_grad import WeightGradientTask
from megasnn.parallel.traffic import traffic
from megasnn.parallel_state import Group
from tests.distributed.whole import build, channels_last, everybody, mine, random, spikes, state_of

T, N, CHANNELS, SIDE = 2, 3, 16, 6
CONVOLUTIONS: dict[str, dict] = {
    "column": dict(kernel_size=3, padding=1, bias=True),
    "row": dict(kernel_size=3, padding=1, stride=2, style="row", bias=True),
    "pointwise": dict(kernel_size=1, dims=1, blocks=2),
    "groups": dict(kernel_size=3, groups=4),
    "pooled": dict(kernel_size=3, padding=1, pool=2),
}
LAYERS = (*CONVOLUTIONS, "linear-row", "linear-column", "attention")


def _layer(name: str, context: BuildContext) -> nn.Module:
    if name in CONVOLUTIONS:
        options = CONVOLUTIONS[name]
        return ParallelConv(CHANNELS, 32, context=context, initialise=trunc_normal, **options)
    if name.startswith("linear"):
        style = name.removeprefix("linear-")
        return ParallelLinear(CHANNELS, 8, context, initialise=trunc_normal, style=style)
    return SpikingSelfAttention(CHANNELS, 4, context, initialise=trunc_normal)


class _Model:
    def __init__(self, name: str, group: Group, dtype: torch.dtype, compute: torch.dtype) -> None:
        self.name, self.group, self.compute = name, group, compute
        self.context = BuildContext(state_of(group), Numerics(dtype, compute))
        self.layer = _layer(name, self.context)
        self.tensors = [e for e in build({name: self.layer}, {}) if e.is_parameter]
        for entry in self.tensors:
            if "norm" in entry.name:
                nn.init.constant_(entry.tensor, 1.5)  # so that neurons fire
        self.input_gradients: list[Tensor] = []
        self.space = () if name.startswith("linear") else (SIDE, SIDE)
        self.layer(mark_spikes(torch.empty(T, N, CHANNELS // group.size, *self.space, device="meta"), 1))

    def backward(self, micro_batch: int) -> None:
        x = spikes(T, N, CHANNELS, *self.space, seed=micro_batch, dtype=self.compute)
        x = channels_last(mine(x, self.group)).requires_grad_()
        y = self.layer(x)
        (y * random(*y.shape, seed=10 + micro_batch, dtype=self.compute)).sum().backward()
        self.input_gradients.append(x.grad)

    def weights(self) -> list[Tensor]:
        """Those whose gradients are left for later."""
        return [e.tensor for e in self.tensors if len(e.shard.global_shape) > 1]

    def results(self) -> list[Tensor]:
        return [*self.input_gradients, *(e.tensor.grad for e in self.tensors)]


def _split_and_whole(name: str, dtype: torch.dtype, compute: torch.dtype) -> None:
    group = everybody()
    whole, split = (_Model(name, group, dtype, compute) for _ in range(2))
    seen: list[Tensor] = []
    split.context.weight_gradients.report_to(seen.append)
    left: list[WeightGradientTask] = []
    for micro_batch in range(3):
        whole.backward(micro_batch)
        with split.context.weight_gradients.deferring() as tasks:
            split.backward(micro_batch)
        left += tasks
    assert seen == [] and all(weight.grad is None for weight in split.weights())
    traffic.reset()
    with traffic.counting():
        for task in left:
            task()
    assert not traffic.by_group  # what other ranks know was exchanged in the first part
    assert sorted(map(id, seen)) == sorted(3 * [id(weight) for weight in split.weights()])
    for coordinates, (a, b) in enumerate(zip(whole.results(), split.results(), strict=True)):
        assert a.any() and torch.equal(a, b), (name, coordinates)


def _all_layers(dtype: torch.dtype, compute: torch.dtype) -> None:
    for name in LAYERS:
        _split_and_whole(name, dtype, compute)


@pytest.mark.parametrize("compute", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [1, 2])
def test_the_sum_of_both_parts_is_the_whole_bit_for_bit(ranks, size, compute) -> None:
    ranks(size, _all_layers, torch.float32, compute)


@pytest.mark.parametrize("name", LAYERS)
def test_frozen_weights_leave_nothing(name) -> None:
    model = _Model(name, Group("tp"), torch.float64, torch.float64)
    for weight in model.weights():
        weight.requires_grad_(False)
    with model.context.weight_gradients.deferring() as tasks:
        model.backward(0)
    assert not tasks and all(weight.grad is None for weight in model.weights())
    assert model.input_gradients[0].any()


def test_what_is_kept_is_packed() -> None:
    """A task of a convolution holds its input with a bit a spike, and lets go of it."""
    model = _Model("pointwise", Group("tp"), torch.float32, torch.float32)
    with model.context.weight_gradients.deferring() as tasks:
        model.backward(0)
    (task,) = tasks
    add = task.args[1]
    payloads = add.args[1]
    assert [(p.dtype, p.numel()) for p in payloads] == [(torch.uint8, T * N * CHANNELS * SIDE * SIDE // 8)]
