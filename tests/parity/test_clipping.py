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
ALL_AXES = Layout(2, 2, 2, "zbv")
# LAMB has a norm for each tensor, which every layout cuts in another way. The others step element by element after the
# same clipping: on one rank, on all axes, and some where rows have owners or are shared.
CHOSEN = [(name, layout, False) for name in OPTIONS for layout in (Layout(), ALL_AXES)]
CHOSEN += [("lamb", each, False) for each in (Layout(data=2), Layout(tensor=2), Layout(pipeline=3), Layout(tensor=4))]
CHOSEN += [
    ("adamw", ALL_AXES, True),
    ("lamb", Layout(data=2), True),
    ("lamb", Layout(4, 1, 2, "zbv", weight=2, scatters=True), True),
    ("adamw", Layout(2, 2, 2, "1f1b", weight=2), False),
    ("lamb", Layout(4, 1, 1, weight=4), False),
    # Ranks that share micro-batches own rows as others do that hold the same.
    ("lamb", Layout(context=2), True),
    ("lamb", Layout(2, 1, 1, context=2), True),
    ("adamw", Layout(1, 2, 2, "zbv", context=2, cut="rows"), True),
]


def _name(case: Any) -> str:
    return name_of(case) if isinstance(case, Layout) else "zero1" * case if isinstance(case, bool) else case


@pytest.mark.parametrize(("optimizer", "layout", "zero1"), CHOSEN, ids=_name)
def test_three_clipped_steps_equal_torch(ranks, optimizer: str, layout: Layout, zero1: bool) -> None:
    """Also where replicas own rows of the weights, or share them, and where ranks share micro-batches."""
    assert_equal_to_truth(CASES[optimizer], ranks, layout, zero1=zero1)


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
