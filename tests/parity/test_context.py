"""Ranks that share every micro-batch, by samples or by rows of its images, compute what one rank computes: in float64,
to 1e-9 relative, with all spikes.

The suite takes each axis, schedule and option with each other once; `pytest -m matrix` takes all layouts.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
from spikingjelly.activation_based.model.spikformer import Spikformer as TheirSpikformer

from megasnn.config.optimizer import OptimizerConfig
from megasnn.grid import ContextCut
from megasnn.models.spikformer.model import Spikformer
from tests.parity import spikingjelly_reference as reference
from tests.parity import vgg
from tests.parity.beside import SPIKFORMER, assert_equal_to_truth
from tests.parity.ranks import TOLERANCE, Layout, assemble, error, name_of, take_steps
from tests.parity.spikingjelly_reference import from_spikingjelly
from tests.parity.test_vgg import require_equal

SIZES = {2: (3, 3, 3, 2), 4: (6, 5)}
"""Of micro-batches, by the number of ranks that share each: none has equally many samples of all of them."""

CUTS: tuple[ContextCut, ...] = ("samples", "rows")
EVERY = [
    Layout(data, tensor, pipeline, schedule, context=context)
    for context, data, tensor, pipeline in product((2, 4), (1, 2), (1, 2), (1, 2))
    if context * data * tensor * pipeline <= 8
    for schedule in (("1f1b", "zbv") if pipeline > 1 else ("1f1b",))
]
EVERY.append(Layout(2, 1, 2, "1f1b", weight=2, context=2, recompute="always"))
CHOSEN = [
    EVERY[-1],
    Layout(context=2),
    Layout(2, 1, 2, "zbv", context=2),
    Layout(1, 2, 2, "1f1b", context=2),
    Layout(1, 2, 1, context=4),
]
OF_VGG = [Layout(2, 2, 1, context=2), Layout(1, 1, 2, "zbv", context=4)]


def _on(chosen: list[Layout]) -> Any:
    every = [
        pytest.param(replace(each, cut=cut), marks=() if each in chosen else pytest.mark.matrix)
        for cut, each in product(CUTS, EVERY)
    ]
    return pytest.mark.parametrize("layout", every, ids=lambda layout: name_of(layout))


@_on(CHOSEN)
def test_spikformer(ranks, layout: Layout) -> None:
    assert_equal_to_truth(replace(SPIKFORMER, sizes=SIZES[layout.context]), ranks, layout)


@_on(OF_VGG)
def test_vgg_with_dropout(ranks, layout: Layout) -> None:
    require_equal(ranks, layout, replace(vgg.DROPOUT, sizes=SIZES[layout.context]))


def test_adamw_on_photographs(ranks, tmp_path) -> None:
    """At these sizes weights were once 8e-6 off: AdamW divides what a gradient lacks by the gradient's own size."""
    options = OptimizerConfig(lr=1e-3, weight_decay=0.0, clip_grad=0.0)
    sides = dict(patch_size=4, in_channels=3, num_classes=10, num_heads=4, mlp_ratio=4.0)
    model = Spikformer(embed_dim=64, depth=3, image_size=32, time_steps=4, **sides)
    torch.manual_seed(0)
    theirs = TheirSpikformer(T=4, img_size_h=32, img_size_w=32, embed_dims=64, depths=3, **sides).double()
    torch.save(from_spikingjelly(theirs.state_dict()), tmp_path / "weights.pt")
    batch = reference.photographs(4, 32), torch.arange(4)
    optimizer = torch.optim.AdamW(theirs.parameters(), options.lr, weight_decay=0.0)
    for _ in range(3):
        reference.step(theirs, *batch, [4])
        optimizer.step()
    expected = from_spikingjelly(theirs.state_dict())
    begun = {"weights": tmp_path / "weights.pt", "micro_batch_size": 4, "options": options}
    found, one = (
        assemble(
            [steps[-1] for steps in ranks(layout.world_size, partial(take_steps, model, layout, batch, 3, **begun))],
            "weights",
        )
        for layout in (Layout(context=2, cut="rows"), Layout())
    )
    for name, value in found.items():
        assert error(value, one[name]) < TOLERANCE, name
        # Rounding of the smallest gradients, divided by their own size, leaves 2e-9 of single small weights.
        assert (value - expected[name]).abs().max() < TOLERANCE * expected[name].abs().max(), name
