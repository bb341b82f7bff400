"""Three steps of each optimizer, with clipping, give the weights of SpikingJelly's model under torch's own functions,
and under a plain LAMB."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from spikingjelly.activation_based.model.spikformer import Spikformer as TheirSpikformer

from megasnn.config.optimizer import OptimizerConfig
from megasnn.models.spikformer.model import Spikformer
from tests.parity import spikingjelly_reference as reference
from tests.parity.beside import SPIKFORMER, assert_equal_to_truth
from tests.parity.ranks import TOLERANCE, Layout, assemble, error, name_of, take_steps
from tests.parity.spikingjelly_reference import from_spikingjelly

EPS = 1e-6  # timm's
CLIP = 0.2
# The rates are large, so that a difference in one step shows.
OPTIONS = {
    "adamw": OptimizerConfig(lr=1e-2, weight_decay=0.0, clip_grad=CLIP),
    "sgd": OptimizerConfig("sgd", lr=0.1, weight_decay=0.05, clip_grad=CLIP),
    "lamb": OptimizerConfig("lamb", lr=1e-2, weight_decay=0.05, clip_grad=CLIP),
}


class PlainLamb:
    """The formula of arXiv 1904.00962 for whole tensors, as timm has it: without a ratio where nothing decays."""

    def __init__(self, groups: list[dict], options: OptimizerConfig) -> None:
        self.groups, self.options, self.steps = groups, options, 0
        self.moments = {p: (torch.zeros_like(p), torch.zeros_like(p)) for group in groups for p in group["params"]}

    @torch.no_grad()
    def step(self) -> None:
        self.steps += 1
        first, second = 0.9, 0.999
        for group in self.groups:
            for p in group["params"]:
                m, v = self.moments[p]
                m.copy_(first * m + (1 - first) * p.grad)
                v.copy_(second * v + (1 - second) * p.grad**2)
                u = (m / (1 - first**self.steps)) / ((v / (1 - second**self.steps)).sqrt() + EPS)
                u = u + group["weight_decay"] * p
                ratio = p.norm() / u.norm() if group["weight_decay"] and p.norm() * u.norm() > 0 else 1.0
                p -= self.options.lr * ratio * u


def theirs(model: torch.nn.Module, options: OptimizerConfig):
    """Matrices and kernels decay, all else does not."""
    groups = [
        {"params": [p for p in model.parameters() if p.dim() > 1], "weight_decay": options.weight_decay},
        {"params": [p for p in model.parameters() if p.dim() <= 1], "weight_decay": 0.0},
    ]
    if options.optimizer == "lamb":
        return PlainLamb(groups, options)
    if options.optimizer == "sgd":
        return torch.optim.SGD(groups, options.lr, 0.9)
    return torch.optim.AdamW(groups, options.lr)


CASES = {name: replace(SPIKFORMER, steps=3, options=options, optimizer=theirs) for name, options in OPTIONS.items()}
LAYOUTS = [Layout(), Layout(data=2), Layout(tensor=2), Layout(pipeline=3), Layout(tensor=4), Layout(2, 2, 2, "zbv")]
SHARDED = [
    Layout(2, tensor, pipeline, schedule)
    for tensor in (1, 2)
    for pipeline, schedule in ((1, "1f1b"), (2, "1f1b"), (2, "zbv"))
]
GATHERED = [
    Layout(4, 1, 2, "zbv", weight=2, scatters=True),
    Layout(2, 2, 2, "1f1b", weight=2),
    Layout(4, 1, 1, weight=4),
]
SHARED = [  # micro-batches; rows have as many owners as ranks hold the same
    (Layout(context=2), True),
    (Layout(2, 1, 1, context=2), True),
    (Layout(1, 2, 2, "zbv", context=2, cut="rows"), True),
    (Layout(1, 2, 2, "zbv", context=2), True),
    (Layout(4, 1, 1, weight=2, context=2), True),
    (Layout(2, 2, 1, weight=2, context=2), False),
    (Layout(2, 1, 1, context=2, cut="rows"), True),
    (Layout(context=2, cut="rows"), False),
]
EVERY = [*SHARED, *((layout, False) for layout in LAYOUTS)]
EVERY += [(layout, True) for layout in (*SHARDED, Layout(data=4))]
EVERY += [(layout, rows_have_owners) for layout in GATHERED for rows_have_owners in (False, True)]
# LAMB has a norm for each tensor, which every layout cuts in another way: it takes all of them. The others step element
# by element after the same clipping; the suite takes one rank and the layout with all axes for them.
CHOSEN = {("lamb", layout, False) for layout in (*LAYOUTS, GATHERED[2])}
CHOSEN |= {(name, layout, False) for name in OPTIONS for layout in (LAYOUTS[0], LAYOUTS[-1])}
CHOSEN |= {("adamw", SHARDED[-1], True), ("lamb", SHARDED[0], True)}
CHOSEN |= {("lamb", GATHERED[0], True), ("adamw", GATHERED[1], False)}
CHOSEN |= {("lamb", *SHARED[0]), ("lamb", *SHARED[1]), ("adamw", *SHARED[2])}


def cases() -> list[Any]:
    """(optimizer, layout, whether rows have owners)."""
    return [
        pytest.param(
            *(name, layout, owners),
            marks=() if (name, layout, owners) in CHOSEN else pytest.mark.matrix,
            id=f"{name}-{name_of(layout)}{'-owners' * owners}",
        )
        for name in OPTIONS
        for layout, owners in EVERY
    ]


@pytest.mark.parametrize(("optimizer", "layout", "rows_have_owners"), cases())
def test_three_clipped_steps_equal_torch(ranks, optimizer: str, layout: Layout, rows_have_owners: bool) -> None:
    """Also where replicas own rows of the weights, or share them, and where ranks share micro-batches."""
    assert_equal_to_truth(CASES[optimizer], ranks, layout, rows_have_owners=rows_have_owners)


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
