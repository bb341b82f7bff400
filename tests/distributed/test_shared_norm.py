"""Norms over samples that ranks share out, against one rank with all of them, in float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from megasnn.comm.shared_statistics import SharedStatistics
from megasnn.comm.statistics import statistics
from megasnn.kernels import NeuronSpec
from megasnn.layers import BuildContext, ConvNormNeuron, ParallelBatchNorm
from tests.distributed.whole import channels_last, everybody, random

C, SAMPLES = 6, 5
CLOSE = dict(rtol=1e-10, atol=1e-11)
NEURONS = {
    "lif": NeuronSpec("lif"),
    "plif": NeuronSpec("plif", decay_input=False),
    "soft": NeuronSpec("lif", v_reset=None, surrogate="atan"),
}


def _layer(kind: str, context: BuildContext) -> torch.nn.Module:
    torch.manual_seed(0)
    if kind == "norm":
        layer: torch.nn.Module = ParallelBatchNorm(C, context)
    else:
        layer = ConvNormNeuron(C, C, 3, context, neuron=NEURONS[kind], bias=True, max_pool=kind != "soft")
    layer = layer.to_empty(device="cpu")
    for index, (name, value) in enumerate([*layer.named_parameters(), *layer.named_buffers()]):
        with torch.no_grad():
            value.copy_(random(*value.shape, seed=index) + (name.endswith("norm.weight")) if value.ndim else value * 0)
    return layer


def _run(kind: str, context: BuildContext, x: Tensor, weights: Tensor) -> dict[str, Tensor]:
    """Output, gradients of the input and of this rank's share of the parameters, and what is recorded."""
    layer = _layer(kind, context).train()
    norm = next(each for each in layer.modules() if isinstance(each, ParallelBatchNorm))
    norm.recording = True
    x = channels_last(x).requires_grad_()
    y = layer(x)
    (y * weights).sum().backward()
    ((mean, variance, count),) = norm.pending
    found = {"y": y.detach(), "x": x.grad, "mean": mean, "variance": variance, "count": torch.as_tensor(count)}
    return found | {name: each.grad for name, each in layer.named_parameters() if each.grad is not None}


def _cut(kind: str, backend: str, shares: tuple[int, ...]) -> tuple[dict[str, Tensor], dict[str, Tensor], int]:
    group = everybody("context")
    own = slice(sum(shares[: group.rank]), sum(shares[: group.rank + 1]))
    x = random(4, SAMPLES, C, 4, 4, seed=50) * 2 + 0.3
    context = BuildContext(dtype=torch.float64, compute_dtype=torch.float64, neuron_backend=backend)
    weights = random(*_run(kind, context, x, torch.ones(()))["y"].shape, seed=51)
    whole = _run(kind, context, x, weights)
    statistics.reset()
    with statistics.counting():
        cut = _run(kind, BuildContext(**{**vars(context), "context": group}), x[:, own], weights[:, own])
    whole["y"], whole["x"] = whole["y"][:, own], whole["x"][:, own]
    return whole, cut, statistics.total("context").bytes


@pytest.mark.parametrize("shares", [(3, 2), (1, 4), (2, 1, 2)], ids=str)
@pytest.mark.parametrize(
    ("kind", "backend"), [("norm", "torch"), ("lif", "torch"), ("plif", "fused"), ("soft", "fused")]
)
def test_shared_samples_are_normalised_together(ranks, kind, backend, shares) -> None:
    found = ranks(len(shares), _cut, kind, backend, shares)
    for whole, cut, _ in found:
        for name in ("y", "x", "mean", "variance", "count"):
            torch.testing.assert_close(cut[name], whole[name].to(cut[name].dtype), **CLOSE)
        if kind != "norm":
            assert torch.equal(cut["y"], whole["y"]) and 0 < cut["y"].mean() < 1
    parameters = found[0][0].keys() - {"y", "x", "mean", "variance", "count"}
    assert len(parameters) >= 2
    for name in parameters:
        total = sum(cut[name] for _, cut, _ in found)
        torch.testing.assert_close(total, found[0][0][name], **CLOSE)


def test_what_travels(ranks) -> None:
    """Forward mean, variance and the count, backward the sums, in double precision, once each."""
    for _, _, moved in ranks(2, _cut, "lif", "torch", (3, 2)):
        assert moved == 8 * (2 * C + 1) + 8 * 3 * C


def _of_nobody() -> tuple[Tensor, Tensor, Tensor]:
    """Statistics where the first rank has no values."""
    group = everybody("context")
    x = random(7 * group.rank, C, seed=3) + 4
    own = x.new_full((2, C), float(9)) if not len(x) else torch.stack([x.mean(0), x.var(0, correction=0)])
    return x, *SharedStatistics(group).statistics(own, len(x))


def test_a_rank_without_values(ranks) -> None:
    (_, *none), (x, *some) = ranks(2, _of_nobody)
    for found, count in (none, some):
        torch.testing.assert_close(found, torch.stack([x.mean(0), x.var(0, correction=0)]), **CLOSE)
        assert count == len(x)
