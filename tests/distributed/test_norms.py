"""Norms cut over channels, replicas, samples and rows, against torch's, SpikingJelly's and one rank, in float64."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from spikingjelly.activation_based import layer as sj
from torch import Tensor, nn

from megasnn.kernels import NeuronSpec
from megasnn.layers import BuildContext, ConvNormNeuron, Numerics, ParallelBatchNorm
from megasnn.layers.init import constant
from megasnn.parallel.collectives import all_reduce_sum
from megasnn.parallel.sync_batch_norm import RunningStatistics, SharedStatistics
from megasnn.parallel.traffic import traffic
from megasnn.parallel_state import Group
from tests.distributed.whole import (
    build,
    channels_last,
    context,
    cut_part,
    everybody,
    mine,
    random,
    require_close,
    state_of,
)
from tests.parts import Part, assemble, gradients, parts

T, N, C, STEPS = 3, 5, 12, 2
CLOSE = dict(rtol=1e-10, atol=1e-11)


@dataclass(frozen=True)
class Case:
    """
    Attributes:
        ours: makes the layer. theirs: makes the reference, on `[T, N, C, *space]`.
        blocks: of channels, each cut by itself.
    """

    ours: Callable[[BuildContext], nn.Module]
    theirs: Callable[[], nn.Module]
    space: tuple[int, ...] = (3, 4)
    blocks: int = 1


def on_frames(norm: nn.Module) -> nn.Module:
    return sj.SeqToANNContainer(norm)


def batch_norm(blocks: int = 1, signals: bool = False, **options: Any) -> Case:
    kind = nn.BatchNorm1d if signals else nn.BatchNorm2d
    return Case(
        lambda c: ParallelBatchNorm(C, c, blocks=blocks, **options),
        lambda: on_frames(kind(C, **options)),
        (6,) if signals else (3, 4),
        blocks=blocks,
    )


CASES: dict[str, Case] = {
    "batch": batch_norm(momentum=0.2),
    "batch of blocks without weights": batch_norm(blocks=3, affine=False, momentum=None),
    "batch of signals without statistics": batch_norm(signals=True, track_running_stats=False),
    "tdbn": Case(
        lambda c: ParallelBatchNorm(C, c, momentum=0.2, initialise=constant(0.7 * 1.3)),
        lambda: sj.ThresholdDependentBatchNorm2d(0.7, 1.3, C, momentum=0.2),
    ),
}


def input_of(one: Case, step: int = 0) -> Tensor:
    of_channels = torch.linspace(-2, 5, C).view(-1, *[1] * len(one.space))
    return random(T, N, C, *one.space, seed=5 + step) * 3 + of_channels


def values_of(norm: nn.Module) -> dict[str, Tensor]:
    named = [(name.split(".")[-1], value) for name, value in norm.named_parameters()]
    return {name: random(*value.shape, seed=20 + index) + 1 for index, (name, value) in enumerate(named)}


def _cut(one: Case) -> list[Part]:
    """Outputs and gradients of two steps, and in evaluation behind them, with all tensors."""
    group, shape = everybody(), tuple(input_of(one).shape)
    if C % (one.blocks * group.size):
        return []
    norm: Any = one.ours(replace(context(group), time_steps=T))
    tensors = build({"norm": norm}, {f"norm.{key}": value for key, value in values_of(one.theirs()).items()})
    found: list[Part] = []
    norm.record_statistics()
    for step in range(STEPS):
        x = channels_last(mine(input_of(one, step), group, blocks=one.blocks)).requires_grad_()
        y = norm(x)
        (y * mine(random(*shape, seed=60), group, blocks=one.blocks)).sum().backward()
        found += [cut_part(name, value, group, one.blocks) for name, value in ((f"y{step}", y), (f"x{step}", x.grad))]
        RunningStatistics([norm], Group("dp")).merge(1)
        assert not norm.pending
    for tensor in tensors:
        if tensor.shard.partial_gradient:
            all_reduce_sum(tensor.tensor.grad, group)
    norm.eval()
    y = norm(channels_last(mine(input_of(one) + 1, group, blocks=one.blocks)))
    found.append(cut_part("evaluated", y, group, one.blocks))
    return found + parts(tensors) + [(f"grad {name}", *rest) for name, *rest in gradients(tensors)]


def _truth(one: Case) -> dict[str, Tensor]:
    norm, found = one.theirs().double(), {}
    with torch.no_grad():
        for (_, parameter), value in zip(norm.named_parameters(), values_of(norm).values(), strict=True):
            parameter.copy_(value)
    for step in range(STEPS):
        x = input_of(one, step).requires_grad_()
        y = norm(x)
        (y * random(*x.shape, seed=60)).sum().backward()
        found |= {f"y{step}": y.detach(), f"x{step}": x.grad}
    norm.eval()
    found["evaluated"] = norm(input_of(one) + 1).detach()
    found |= {f"norm.{name.split('.')[-1]}": value for name, value in norm.state_dict().items()}
    return found | {f"grad norm.{name.split('.')[-1]}": p.grad for name, p in norm.named_parameters()}


def _all_cut() -> list[list[Part]]:
    return [_cut(one) for one in CASES.values()]


@pytest.mark.parametrize("size", [1, 2, 4])
def test_every_norm_against_spikingjellys_or_torchs(ranks, size: int) -> None:
    everyone = ranks(size, _all_cut)
    for index, (name, one) in enumerate(CASES.items()):
        if everyone[0][index]:
            require_close(assemble([rank[index] for rank in everyone]), _truth(one), name, **CLOSE)


SHARES = [[4, 4], [4], [2]]  # micro-batches of three replicas: uneven in number and size


def batch(index: int, samples: int) -> Tensor:
    return random(2, samples, C, 3, 4, seed=index) * 3 + torch.linspace(-2, 5, C).view(-1, 1, 1)


def _replica() -> dict[str, Tensor]:
    group, own = everybody("dp"), replace(context(Group("tp")), time_steps=2)
    norms: dict[str, Any] = {name: ParallelBatchNorm(C, own) for name in ("one", "two")}
    norms["free"] = ParallelBatchNorm(C, own, track_running_stats=False)
    tensors = build(norms, {})
    for norm in norms.values():
        norm.record_statistics()
    done = sum(len(share) for share in SHARES[: group.rank])
    for index, samples in enumerate(SHARES[group.rank]):
        x = batch(done + index, samples)
        norms["two"](norms["one"](x) * 2 + x[:, :, :1])
        norms["free"](x)
    RunningStatistics(list(norms.values()), group).merge(max(map(len, SHARES)))
    return {each.name: each.tensor.clone() for each in tensors if not each.is_parameter}


def test_statistics_of_uneven_replicas_are_those_of_the_whole_batch(ranks) -> None:
    first, *others = ranks(3, _replica)
    assert all(torch.equal(value, other[name]) for other in others for name, value in first.items())
    inputs = [batch(index, samples) for index, samples in enumerate(samples for share in SHARES for samples in share)]
    normed = [on_frames(nn.BatchNorm2d(C)).double()(x) * 2 + x[:, :, :1] for x in inputs]
    for name, values in (("one", inputs), ("two", normed)):
        truth = nn.BatchNorm2d(C).double()
        truth(torch.cat([each.detach().flatten(0, 1) for each in values]))
        for buffer, value in truth.named_buffers():
            torch.testing.assert_close(first[f"{name}.{buffer}"], value, **CLOSE)
    assert not [name for name in first if name.startswith("free")]


def test_statistics_of_bfloat16_are_float32_and_initial_weights_as_given() -> None:
    norm, x = ParallelBatchNorm(C, context(Group("tp"), torch.float32)), batch(0, 5).bfloat16()
    td = ParallelBatchNorm(C, initialise=constant(1.5))
    build({"norm": norm, "td": td}, {})
    norm.record_statistics()
    assert norm(x).dtype == torch.bfloat16 and torch.equal(td.weight, torch.full((C,), 1.5))
    ((mean, variance, count),) = norm.pending
    flat = x.float().flatten(0, 1)
    assert mean.dtype == variance.dtype == torch.float32 and count == flat.numel() // C
    torch.testing.assert_close(mean, flat.mean((0, 2, 3)))
    torch.testing.assert_close(variance, flat.var((0, 2, 3), correction=0))


def test_a_unit_takes_another_norm() -> None:
    """The same as the parts one after another; an image of a single time step comes at every step."""
    options = replace(context(Group("tp")), time_steps=T)
    norm = CASES["tdbn"].ours(options)
    unit = ConvNormNeuron(C, C, 3, options, norm=norm, neuron=NeuronSpec())
    build({"unit": unit}, {f"unit.norm.{name}": value for name, value in values_of(CASES["tdbn"].theirs()).items()})
    x = input_of(CASES["tdbn"])[:1]
    spikes = unit(x)
    assert torch.equal(spikes, unit.neuron(norm(unit.conv(x.expand(T, *x.shape[1:]))))) and 0.05 < spikes.mean() < 0.95


def test_other_channels_are_refused() -> None:
    with pytest.raises(ValueError, match="8 channels takes .*, got 4"):
        ParallelBatchNorm(8)(torch.zeros(1, 2, 4, 3, device="meta"))


# --- samples and rows that ranks share out

NEURONS = {
    "lif": NeuronSpec("lif"),
    "plif": NeuronSpec("plif", decay_input=False),
    "soft": NeuronSpec("lif", v_reset=None, surrogate="atan"),
}


def _run(kind: str, own: BuildContext, x: Tensor, weights: Tensor) -> dict[str, Tensor]:
    """Output, gradients of the input and of this rank's share of the parameters, and what is recorded."""
    layer: Any = ParallelBatchNorm(C, own)
    if kind != "norm":
        layer = ConvNormNeuron(C, C, 3, own, neuron=NEURONS[kind], bias=True, max_pool=kind != "soft")
    layer = layer.to_empty(device="cpu")
    for index, (name, value) in enumerate([*layer.named_parameters(), *layer.named_buffers()]):
        with torch.no_grad():
            value.copy_(random(*value.shape, seed=index) + (name.endswith("norm.weight")) if value.ndim else value * 0)
    norm = layer if kind == "norm" else layer.norm
    norm.record_statistics()
    x = channels_last(x).requires_grad_()
    y = layer(x)
    (y * weights).sum().backward()
    ((mean, variance, count),) = norm.pending
    found = {"y": y.detach(), "x": x.grad, "mean": mean, "variance": variance, "count": torch.as_tensor(count)}
    return found | {name: each.grad for name, each in layer.named_parameters() if each.grad is not None}


def _shared(shares: tuple[int, ...]) -> list[tuple[dict[str, Tensor], dict[str, Tensor], int]]:
    group, found = everybody("cp"), []
    own = slice(sum(shares[: group.rank]), sum(shares[: group.rank + 1]))
    x = random(4, N, C, 4, 4, seed=50) * 2 + 0.3
    for kind, backend in SHARED:
        one = BuildContext(numerics=Numerics(torch.float64, torch.float64, backend))
        weights = random(*_run(kind, one, x, torch.ones(()))["y"].shape, seed=51)
        whole = _run(kind, one, x, weights)
        traffic.reset()
        with traffic.counting():
            cut = _run(kind, replace(one, state=state_of(group)), x[:, own], weights[:, own])
        whole["y"], whole["x"] = whole["y"][:, own], whole["x"][:, own]
        found.append((whole, cut, traffic.by_group["cp"].bytes))
    return found


SHARED = [("norm", "torch"), ("lif", "torch"), ("plif", "fused"), ("soft", "fused")]


@pytest.mark.parametrize("shares", [(1, 4), (2, 1, 2)], ids=str)
def test_shared_samples_are_normalised_together(ranks, shares: tuple[int, ...]) -> None:
    told, others = ("y", "x", "mean", "variance", "count"), len(shares) - 1
    for (kind, _), found in zip(SHARED, zip(*ranks(len(shares), _shared, shares), strict=True), strict=True):
        for whole, cut, moved in found:
            for name in told:
                torch.testing.assert_close(cut[name], whole[name].to(cut[name].dtype), **CLOSE)
            assert kind == "norm" or torch.equal(cut["y"], whole["y"]) and 0 < cut["y"].mean() < 1
            if kind == "norm":  # sums and the count, squares, and the gradients of both, in double precision
                assert moved == 2 * sum(2 * others * 8 * values // len(shares) for values in (C + 1, C))
            else:  # forward mean, variance and the count, backward the sums, once each
                assert moved == others * 8 * (2 * C + 1 + 3 * C)
        parameters = found[0][0].keys() - set(told)
        assert len(parameters) >= 2
        for name in parameters:
            torch.testing.assert_close(sum(cut[name] for _, cut, _ in found), found[0][0][name], **CLOSE)


def _of_nobody() -> tuple[Tensor, Tensor, Tensor]:
    """Statistics where the first rank has no values."""
    group = everybody("cp")
    x = random(7 * group.rank, C, seed=3) + 4
    own = x.new_full((2, C), float(9)) if not len(x) else torch.stack([x.mean(0), x.var(0, correction=0)])
    return x, *SharedStatistics(group).statistics(own, len(x))


def test_a_rank_without_values(ranks) -> None:
    (_, *none), (x, *some) = ranks(2, _of_nobody)
    for found, count in (none, some):
        torch.testing.assert_close(found, torch.stack([x.mean(0), x.var(0, correction=0)]), **CLOSE)
        assert count == len(x)
