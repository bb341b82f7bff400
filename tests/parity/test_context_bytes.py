"""What ranks that share micro-batches receive of each other, beside tensor parallel ranks; in float32, as it travels in
training."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from megasnn.grid import ContextCut
from megasnn.layers.shape_inference import calls_of
from megasnn.models.build import describe
from megasnn.models.model import Model
from megasnn.models.spikformer.model import Spikformer
from megasnn.models.vgg_dvs.model import VggDvs
from megasnn.parallel.traffic import Traffic, traffic
from tests.parity import spikingjelly_reference as reference
from tests.parity.beside import SPIKFORMER
from tests.parity.ranks import Layout, built, record_step

Received = dict[str, Traffic]


def moved_and_norms(
    model: Model, layout: Layout, batch: tuple[Tensor, Tensor], micro_batch_size: int
) -> tuple[Received, list[tuple[int, int]]]:
    """What this rank received in a step, by group; and calls and channels of each norm."""
    with built(describe(model), layout, torch.float32) as engine:
        traffic.reset()
        with traffic.counting():
            record_step(engine, *batch, micro_batch_size)
        found = dict(traffic.by_group)
        traffic.reset()
        return found, [(calls_of(norm), norm.running_mean.numel()) for norm in engine.norms]


@pytest.mark.parametrize(
    ("layout", "sizes"),
    [(Layout(context=2), (3, 3, 3, 2)), pytest.param(Layout(context=4), (6, 5), marks=pytest.mark.matrix)],
)
def test_statistics_are_all_that_travels_inside_of_layers(ranks, layout: Layout, sizes: tuple[int, ...]) -> None:
    """To the byte: mean, variance and a count forward, three sums backward, in double precision."""
    batch = reference.data(dtype=torch.float32)
    for found, norms in ranks(layout.world_size, moved_and_norms, SPIKFORMER.model, layout, batch, sizes[0]):
        others, micro_batches = layout.context - 1, len(sizes)
        calls, channels = sum(calls for calls, _ in norms), sum(calls * count for calls, count in norms)
        numbers = 2 * channels + calls + 3 * channels
        size = micro_batches * others * 8 * numbers
        assert found["cp"] == Traffic(2 * micro_batches * calls, size, size)
        assert set(found) == {"cp", "dp", "world"}, "gradients, and a step's sums"


SMALL: dict[str, Model] = {
    "spikformer": Spikformer(embed_dim=32, depth=1, num_heads=2, image_size=32, patch_size=4, time_steps=2),
    "vgg": VggDvs(channels="8,8,P,16,P", image_size=16, time_steps=2),
}


EXCHANGES: dict[tuple[str, ContextCut], int] = {
    ("spikformer", "rows"): 31,
    ("spikformer", "samples"): 18,
    ("vgg", "rows"): 13,
    ("vgg", "samples"): 6,
}
"""Of a step of one micro-batch, how often ranks that share it exchange something."""


@pytest.mark.parametrize(("name", "cut"), EXCHANGES)
def test_the_number_of_exchanges(ranks, name: str, cut: ContextCut) -> None:
    model = SMALL[name]
    batch = torch.zeros(2, *model.input_shape), torch.zeros(2, dtype=torch.int64)
    for found, _ in ranks(2, moved_and_norms, model, Layout(context=2, cut=cut), batch, 2):
        assert found["cp"].calls == EXCHANGES[name, cut]
