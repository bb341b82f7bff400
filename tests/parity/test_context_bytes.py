"""What ranks that share images by rows receive of each other, beside tensor parallel ranks; in float32, as it travels
in training."""

from __future__ import annotations

import pytest
import torch

from megasnn.grid import ContextCut
from megasnn.layers.shape_inference import exchanges_of
from megasnn.models.build import describe
from megasnn.models.model import Model
from megasnn.models.spikformer.model import Spikformer
from megasnn.models.vgg_dvs.model import VggDvs
from megasnn.parallel.traffic import statistics
from megasnn.parallel_state import destroy_model_parallel
from tests.models.steps import take_steps
from tests.parity.ranks import Layout, join

SAMPLES = 8
INSIDE = ("tp", "cp")
"""The groups whose ranks tell each other something inside of layers."""

MODELS: dict[str, tuple[Model, float]] = {
    "spikformer": (Spikformer(variant="spikformer_cifar10", image_size=32, time_steps=4), 1 / 4),
    "vgg": (VggDvs(image_size=48, time_steps=10), 1 / 8),
}
"""Whole models, and how much of the bytes of tensor parallel ranks they may receive at most."""


def received(model: Model, layout: Layout) -> int:
    """Bytes of a step, statistics of norms included, of which a rank keeps its own share."""
    generator = torch.Generator().manual_seed(7)
    batch = torch.randn(SAMPLES, *model.input_shape, generator=generator), torch.arange(SAMPLES) % model.num_classes
    statistics.reset()
    with statistics.counting():
        take_steps(model, layout, batch, 1, micro_batch_size=SAMPLES)
    return sum(statistics.total(group).bytes for group in INSIDE)


@pytest.mark.matrix
@pytest.mark.parametrize("name", MODELS)
def test_rows_receive_a_fraction_of_what_channels_do(ranks, name: str) -> None:
    model, most = MODELS[name]
    by_channels = ranks(2, received, model, Layout(tensor=2), timeout=400)
    by_rows = ranks(2, received, model, Layout(context=2, cut="rows"), timeout=400)
    assert 0 < max(by_rows) <= most * max(by_channels), (by_rows, by_channels)


SMALL: dict[str, Model] = {
    "spikformer": Spikformer(embed_dim=32, depth=1, num_heads=2, image_size=32, patch_size=4, time_steps=2),
    "vgg": VggDvs(channels="8,8,P,16,P", image_size=16, time_steps=2),
}


def exchanges(model: Model, layout: Layout) -> tuple[dict[str, int], tuple[int, int]]:
    """Of a step of one micro-batch, how often this rank and others that share it told each other something, forward and
    backward: by the count of traffic, and by what the layers say."""
    statistics.reset()
    with statistics.counting():
        batch = torch.zeros(2, *model.input_shape), torch.zeros(2, dtype=torch.int64)
        take_steps(model, layout, batch, 1, micro_batch_size=2)
    found = {"forward": 0, "backward": 0}
    for (group, _, direction), traffic in statistics.read().items():
        if group == "cp":
            found[direction] += traffic.calls
    state = join(layout)
    try:
        return found, exchanges_of(describe(model).build(layout.build_context(state, torch.float32)))
    finally:
        destroy_model_parallel()


@pytest.mark.parametrize("cut", ["rows", "samples"])
@pytest.mark.parametrize("name", SMALL)
def test_the_number_of_exchanges_is_told(ranks, name: str, cut: ContextCut) -> None:
    for found, told in ranks(2, exchanges, SMALL[name], Layout(context=2, cut=cut)):
        assert (found["forward"], found["backward"]) == told and min(told) >= 3
