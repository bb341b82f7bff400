"""What ranks that share micro-batches receive of each other; in float32, as it travels in training."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from megasnn.grid import ContextCut
from megasnn.models.build import describe
from megasnn.models.model import Model
from megasnn.models.spikformer.model import Spikformer
from megasnn.models.vgg_dvs.model import VggDvs
from megasnn.parallel.traffic import traffic
from tests.parity.ranks import Layout, built, record_step


def exchanges(model: Model, cut: ContextCut, batch: tuple[Tensor, Tensor]) -> int:
    """How often this rank exchanges something in a step of one micro-batch that it shares."""
    with built(describe(model), Layout(context=2, cut=cut), torch.float32) as engine:
        traffic.reset()
        with traffic.counting():
            record_step(engine, *batch, len(batch[1]))
        found = traffic.by_group["cp"].calls
        traffic.reset()
        return found


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
"""Of ranks that share samples twice for each norm, with the bytes that tests/distributed/test_norms.py counts."""


@pytest.mark.parametrize(("name", "cut"), EXCHANGES)
def test_the_number_of_exchanges(ranks, name: str, cut: ContextCut) -> None:
    model = SMALL[name]
    batch = torch.zeros(2, *model.input_shape), torch.zeros(2, dtype=torch.int64)
    assert ranks(2, exchanges, model, cut, batch) == [EXCHANGES[name, cut]] * 2
