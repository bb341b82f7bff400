"""ParallelLinear in all styles against F.linear in float64."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megasnn.kernels import spike_codec as codec
from megasnn.kernels.spike_codec import remember_bits
from megasnn.layers import ParallelLinear, weighted
from megasnn.layers.shape_inference import mark_spikes
from tests.distributed.whole import build, by_one, context, everybody, random, require_close, run, spikes
from tests.parts import Part, assemble

T, N, OUTPUTS = 2, 3, 12
CASES = [(style, holds_spikes) for style in ("column", "row") for holds_spikes in (False, True)]
WEIGHTS = {"weight": random(OUTPUTS, 8), "bias": random(OUTPUTS, seed=1)}


def _input(holds_spikes: bool) -> Tensor:
    return (spikes if holds_spikes else random)(T, N, 8, seed=4)


def _run_all() -> list[list[Part]]:
    group, found = everybody(), []
    for style, holds_spikes in CASES:
        layer = ParallelLinear(8, OUTPUTS, context(group), style=style)
        options = {"whole_output": style == "row", "holds_spikes": holds_spikes, "order": torch.clone}
        found.append(run(layer, WEIGHTS, _input(holds_spikes), group, **options))
    return found


@pytest.mark.parametrize("size", [1, 2, 4])
def test_outputs_and_gradients_are_those_of_one_rank(ranks, size) -> None:
    everyone = ranks(size, _run_all)
    for number, case in enumerate(CASES):
        given = {name: value.clone().requires_grad_() for name, value in WEIGHTS.items()}
        expected = by_one(lambda x, given=given: F.linear(x, given["weight"], given["bias"]), given, _input(case[1]))
        found = assemble([rank[number] for rank in everyone])
        require_close(found, expected, case, rtol=1e-12, atol=1e-12)


def test_spikes_that_know_their_bits_are_not_packed_again(monkeypatch) -> None:
    layer, x = ParallelLinear(8, OUTPUTS), spikes(T, N, 8)
    build({"layer": layer}, {})
    layer(mark_spikes(x.to("meta")))

    def gradient_of(x: Tensor) -> Tensor:
        layer.weight.grad = None
        layer(x).sum().backward()
        return layer.weight.grad

    expected, packed = gradient_of(x), codec.pack_bits(x)
    monkeypatch.setattr(weighted, "encode", None)
    assert torch.equal(gradient_of(remember_bits(x, packed)), expected)
    turned = remember_bits(x.transpose(0, 1).contiguous().transpose(0, 1), packed)  # bits of another order
    with pytest.raises(TypeError):
        layer(turned)
