"""Inside of `torch.inference_mode` an engine computes what it does outside, and trains on behind it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from megasnn.engine import Engine
from megasnn.kernels.products import ConvolutionProducts
from megasnn.kernels.spike_codec import Content, bits_of
from megasnn.layers import ParallelConv
from megasnn.parallel.sharding import materialise
from tests.engine.test_engine import MODEL, PP2

SIZES = {"micro_batch_size": 5, "global_batch_size": 10, "train_iters": 3, "lr": 1e-2}


def computed(flags: dict[str, Any], inference: bool) -> list[Any]:
    """Of an engine that evaluates and predicts before, between and behind steps: all that it tells."""
    random = torch.Generator().manual_seed(0)
    images, labels = torch.rand(10, *MODEL.input_shape, generator=random), torch.arange(10)
    found: list[Any] = []
    with Engine(MODEL, **SIZES, **flags) as engine:
        for _ in range(2):
            with torch.inference_mode(inference):
                found += [engine.evaluate(images, labels), engine.predict(images)]
            found.append(engine.train_step(images, labels).loss)
    return found


def same(a: Any, b: Any) -> bool:
    return torch.equal(a, b) if isinstance(a, Tensor) else bool(a == b)


@pytest.mark.parametrize(
    "flags",
    [{}, {"sparse_products": "off"}, {"precision": "bf16"}, {"recompute": "always"}],
    ids=["sparse", "dense", "bf16", "recompute"],
)
def test_an_engine(flags: dict[str, Any]) -> None:
    inside, outside = computed(flags, True), computed(flags, False)
    assert all(map(same, inside, outside)) and not same(inside[1], inside[4])


def test_stages_of_a_pipeline(ranks) -> None:
    for inside, outside in zip(ranks(2, computed, PP2, True), ranks(2, computed, PP2, False), strict=True):
        assert all(map(same, inside, outside))


@pytest.mark.parametrize("sparse", [True, False])
def test_a_layer(sparse: bool) -> None:
    """Its products know of bits where sums over spikes may use them; not those of a tensor of inference mode."""
    layer = ParallelConv(16, 16, 3, padding=1, content=Content.SPIKES)
    layer(torch.empty(2, 3, 16, 8, 8, device="meta"))
    materialise([("layer", layer)], torch.device("cpu"), seed=0)
    layer.plan = replace(layer.plan, products=replace(layer.plan.products, sparse=sparse))
    x = (torch.rand(2, 3, 8, 8, 16) < 0.2).float().movedim(-1, 2)
    knew = []

    def output(products: ConvolutionProducts, images: Tensor, weight: Tensor) -> Tensor:
        knew.append(bits_of(images) is not None)
        return formed(products, images, weight)

    formed = ConvolutionProducts.output
    with mock.patch.object(ConvolutionProducts, "output", output):
        outside = layer(x)
        with torch.inference_mode():
            assert torch.equal(layer(x), outside) and torch.equal(layer(x.clone()), outside)
    assert knew == [sparse, sparse, False]
