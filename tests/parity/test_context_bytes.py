"""What ranks that share images by rows receive of each other, beside tensor parallel ranks; in float32, as it travels
in training."""

from __future__ import annotations

import pytest
import torch

from megasnn.comm.statistics import statistics
from megasnn.models.model import Model
from megasnn.models.spikformer.dimensions import Spikformer
from megasnn.models.vgg_dvs.dimensions import VggDvs
from tests.models.steps import take_steps
from tests.parity.ranks import Layout

SAMPLES = 8
INSIDE = ("tensor", "context")
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
