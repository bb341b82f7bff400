"""Norms over samples that ranks share out, against one rank with all of them, in float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from megasnn.kernels import NeuronSpec
from megasnn.kernels.neuron import norm_pool_neuron
from megasnn.layers import BuildContext, ConvNormNeuron, ParallelBatchNorm
from megasnn.parallel.sync_batch_norm import SharedStatistics
from megasnn.parallel.traffic import statistics
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


def _rows(backend: str, heights: tuple[int, ...], kind: str) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Pooled units on rows of images: what one rank computes of the whole ones, and this rank of its own rows."""
    group, spec = everybody("context"), NEURONS[kind]
    first = sum(heights[: group.rank])
    own = slice(first, first + heights[group.rank])
    x = channels_last(random(4, 2, C, sum(heights), 5, seed=60) * 2 + 0.3)
    options = {"spec": spec, "training": True, "pool": True, "backend": backend}

    def run(x: Tensor, weights: slice, above: Tensor | None = None, shared: SharedStatistics | None = None) -> dict:
        x, w = x.detach().clone(memory_format=torch.preserve_format).requires_grad_(), None
        above = None if above is None else above.detach().clone().requires_grad_()
        weight, bias = (random(C, seed=61) + 1).requires_grad_(), random(C, seed=62).requires_grad_()
        if spec.kind == "plif":
            w = torch.tensor(0.4, dtype=torch.float64, requires_grad=True)
        y, mean, variance, count = norm_pool_neuron(x, weight, bias, w=w, shared=shared, above=above, **options)
        (y * random(4, 2, C, -(-sum(heights) // 2), 3, seed=63)[:, :, :, weights]).sum().backward()
        found = {"y": y.detach(), "mean": mean, "variance": variance, "count": torch.as_tensor(count), "x": x.grad}
        found |= {} if above is None else {"above": above.grad}
        return found | {"weight": weight.grad, "bias": bias.grad} | ({} if w is None else {"w": w.grad})

    whole = run(x, slice(None))
    above = x[:, :, :, first - 1 : first] if first else None
    rows = slice(first // 2, -(-own.stop // 2))
    cut = run(channels_last(x[:, :, :, own]), rows, above, SharedStatistics(group))
    whole["y"] = whole["y"][:, :, :, rows]
    return whole, cut


@pytest.mark.parametrize("heights", [(4, 4), (2, 5), (4, 2, 3), (6, 1)], ids=str)
@pytest.mark.parametrize(("backend", "kind"), [("torch", "lif"), ("fused", "plif"), ("fused", "soft")])
def test_shared_rows_are_normalised_and_pooled_together(ranks, backend, kind, heights) -> None:
    found = ranks(len(heights), _rows, backend, heights, kind)
    whole = found[0][0]
    for expected, cut in found:
        for name in ("y", "mean", "variance", "count"):
            torch.testing.assert_close(cut[name], expected[name].to(cut[name].dtype), **CLOSE)
        assert torch.equal(cut["y"], expected["y"]) and 0 < cut["y"].mean() < 1
    gradients = [cut["x"].clone() for _, cut in found]
    for gradient, (_, below) in zip(gradients, found[1:], strict=False):
        gradient[:, :, :, -1:] += below["above"]
    torch.testing.assert_close(torch.cat(gradients, 3), whole["x"], **CLOSE)
    for name in {"weight", "bias", "w"} & whole.keys():
        torch.testing.assert_close(sum(cut[name] for _, cut in found), whole[name], **CLOSE)


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
