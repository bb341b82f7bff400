"""What ranks that share micro-batches receive of each other; in float32, as it travels in training."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from megasnn.common.grid import ContextCut
from megasnn.models.build import describe_model
from megasnn.models.model import Model
from megasnn.models.spikformer.model import Spikformer
from megasnn.models.vgg_dvs.model import VggDvs
from megasnn.parallel.traffic import traffic
from tests.parity.ranks import Layout, built, record_step


def exchanged(model: Model, cut: ContextCut, batch: tuple[Tensor, Tensor]) -> tuple[int, int]:
    """Exchanges, and bytes that this rank receives in them, in a step of one micro-batch that it shares."""
    with built(describe_model(model), Layout(context=2, cut=cut), torch.float32) as engine:
        traffic.reset()
        with traffic.counting():
            record_step(engine, *batch, len(batch[1]))
        found = traffic.by_group["cp"]
        traffic.reset()
        return found.calls, found.bytes


SMALL: dict[str, Model] = {
    "spikformer": Spikformer(embed_dim=32, depth=1, num_heads=2, image_size=32, patch_size=4, time_steps=2),
    "vgg": VggDvs(channels="8,8,P,16,P", image_size=16, time_steps=2),
}


EXCHANGED: dict[tuple[str, ContextCut], list[tuple[int, int]]] = {
    ("spikformer", "rows"): [(31, 50280), (31, 42344)],
    ("spikformer", "samples"): [(18, 15272), (18, 15272)],
    ("vgg", "rows"): [(13, 7384), (13, 7384)],
    ("vgg", "samples"): [(6, 1304), (6, 1304)],
}
"""Calls and bytes of each rank. Statistics of C channels in n norms are 8 (2 C + n) bytes forward and 8 x 3 C backward:
all of what is received by samples (C 380 and 32, n 9 and 3). By rows a VGG also receives 960 bytes of rows forward,
spikes as bits, and 4 x 2 x 2 (8 x 16 + 8 x 8 + 16 x 4 x 2) of gradients: averaged pixels have one for each window."""


@pytest.mark.parametrize(("name", "cut"), EXCHANGED)
def test_what_ranks_exchange(ranks, name: str, cut: ContextCut) -> None:
    model = SMALL[name]
    batch = torch.zeros(2, *model.input_shape), torch.zeros(2, dtype=torch.int64)
    assert ranks(2, exchanged, model, cut, batch) == EXCHANGED[name, cut]
