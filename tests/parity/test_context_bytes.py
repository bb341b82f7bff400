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
from megasnn.parallel.traffic import Traffic, traffic
from tests.parity.ranks import Layout, built, record_step

Received = dict[tuple[str, str, str], Traffic]


def received(model: Model, cut: ContextCut, batch: tuple[Tensor, Tensor]) -> Received:
    """What this rank received in a step of one micro-batch, by group, operation and direction."""
    with built(describe(model), Layout(context=2, cut=cut), torch.float32) as engine:
        traffic.reset()
        with traffic.counting():
            record_step(engine, *batch, len(batch[1]))
        found = dict(traffic.read())
        traffic.reset()
        return found


SMALL: dict[str, Model] = {
    "spikformer": Spikformer(embed_dim=32, depth=1, num_heads=2, image_size=32, patch_size=4, time_steps=2),
    "vgg": VggDvs(channels="8,8,P,16,P", image_size=16, time_steps=2),
}


def test_gradients_of_pooled_rows_travel_one_for_each_window(ranks) -> None:
    """To the byte: of the two convolutions behind the first, and of the classifier."""
    batch = torch.randn(4, *SMALL["vgg"].input_shape), torch.arange(4)
    found = ranks(2, received, SMALL["vgg"], "rows", batch)
    values = 2 * 4 * (8 * 16 + 8 * 8 + 16 * 4 * 2)
    assert [each["cp", "all_to_all", "backward"].bytes for each in found] == [4 * values] * 2


EXCHANGES: dict[tuple[str, ContextCut], tuple[int, int]] = {
    ("spikformer", "rows"): (16, 15),
    ("spikformer", "samples"): (9, 9),
    ("vgg", "rows"): (7, 6),
    ("vgg", "samples"): (3, 3),
}
"""How often ranks that share a micro-batch exchange something, forward and backward. Those that share samples do so
once for each norm, with the bytes that tests/distributed/test_norms.py counts."""
WAYS = "forward", "backward"


@pytest.mark.parametrize(("name", "cut"), EXCHANGES)
def test_the_number_of_exchanges(ranks, name: str, cut: ContextCut) -> None:
    model = SMALL[name]
    batch = torch.zeros(2, *model.input_shape), torch.zeros(2, dtype=torch.int64)
    for found in ranks(2, received, model, cut, batch):
        calls = [sum(each.calls for key, each in found.items() if key[::2] == ("cp", way)) for way in WAYS]
        assert calls == list(EXCHANGES[name, cut])
