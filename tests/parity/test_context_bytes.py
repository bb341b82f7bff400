"""What ranks that share images by rows receive of each other, beside tensor parallel ranks; in float32, as it travels
in training."""

from __future__ import annotations

import pytest
import torch

from megasnn.grid import ContextCut
from megasnn.models.model import Model
from megasnn.models.spikformer.model import Spikformer
from megasnn.models.vgg_dvs.model import VggDvs
from megasnn.parallel.traffic import statistics
from tests.models.steps import take_steps
from tests.parity.ranks import Layout

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


EXCHANGES: dict[tuple[str, ContextCut], tuple[int, int]] = {
    ("spikformer", "rows"): (16, 15),
    ("spikformer", "samples"): (9, 9),
    ("vgg", "rows"): (7, 6),
    ("vgg", "samples"): (3, 3),
}
"""Of a step of one micro-batch, how often ranks that share it exchange something, forward and backward."""


def exchanges(model: Model, layout: Layout) -> tuple[int, int]:
    statistics.reset()
    with statistics.counting():
        batch = torch.zeros(2, *model.input_shape), torch.zeros(2, dtype=torch.int64)
        take_steps(model, layout, batch, 1, micro_batch_size=2)
    found = {"forward": 0, "backward": 0}
    for (group, _, direction), traffic in statistics.read().items():
        if group == "cp":
            found[direction] += traffic.calls
    return found["forward"], found["backward"]


@pytest.mark.parametrize(("name", "cut"), EXCHANGES)
def test_the_number_of_exchanges(ranks, name: str, cut: ContextCut) -> None:
    assert ranks(2, exchanges, SMALL[name], Layout(context=2, cut=cut)) == [EXCHANGES[name, cut]] * 2
