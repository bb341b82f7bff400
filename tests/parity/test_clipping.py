"""Three steps of each optimizer, with clipping, give the weights of SpikingJelly's model under torch's own functions,
and under a plain LAMB."""

from __future__ import annotations

from functools import cache
from itertools import product

import pytest
import torch
from torch import Tensor

from megasnn.checkpoint.load import load_globals_into
from megasnn.config.optimizer import OptimizerConfig
from megasnn.grid import HOLDING_AXES
from megasnn.optim.build import build_optimizer
from megasnn.parallel_state import destroy_model_parallel
from tests.parity import spikingjelly_reference as reference
from tests.parity.ranks import Layout, RankStep, assemble, build_engine, join, record_step, weights_of
from tests.parity.spikingjelly_reference import from_spikingjelly
from tests.parity.test_layouts import SIZES, TOLERANCE, error, name_of

STEPS = 3
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


@cache
def truth(name: str) -> tuple[dict[str, Tensor], dict[str, Tensor], list[float]]:
    """SpikingJelly's state before and after, and the norm of each step's gradient."""
    model = reference.build()
    images, labels = reference.data(sum(SIZES))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    optimizer, norms = theirs(model, OPTIONS[name]), []
    for _ in range(STEPS):
        reference.step(model, images, labels, SIZES)
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP).item())
        optimizer.step()
    return before, {name: value.clone() for name, value in model.state_dict().items()}, norms


def train(
    layout: Layout,
    options: OptimizerConfig,
    weights: dict[str, Tensor],
    images: Tensor,
    labels: Tensor,
    rows_have_owners: bool = False,
) -> list[RankStep]:
    """On every rank: what each step came to, with the parameters after it in the place of gradients."""
    state = join(layout)
    try:
        engine = build_engine(state, layout.schedule, torch.float64, rows_have_owners=rows_have_owners, layout=layout)
        load_globals_into(engine.tensors, from_spikingjelly(weights), state.world.handle)
        groups = {axis: state.group(axis) for axis in HOLDING_AXES}
        optimizer, steps = build_optimizer(engine.owned, options, groups), []
        for _ in range(STEPS):
            steps.append(record_step(engine, state, images, labels, SIZES[0]))
            engine.gradient_norm.clip(steps[-1].norm, CLIP)
            optimizer.step()
            engine.gradient_buckets.all_gather_params()
            steps[-1].gradients = weights_of(engine)
        return steps
    finally:
        destroy_model_parallel()


LAYOUTS = [Layout(), Layout(data=2), Layout(tensor=2), Layout(pipeline=3), Layout(tensor=4), Layout(2, 2, 2, "zbv")]
SHARDED = [
    Layout(2, tensor, pipeline, schedule)
    for tensor in (1, 2)
    for pipeline, schedule in ((1, "1f1b"), (2, "1f1b"), (2, "zbv"))
]
# LAMB has a norm for each tensor, which every layout cuts in another way: it takes all of them. The others step element
# by element after the same clipping; the suite takes one rank and the layout with all axes for them.
WHOLE = (LAYOUTS[0], LAYOUTS[-1])


def cases() -> list[object]:
    chosen = {(name, layout): name == "lamb" or layout in WHOLE for name in OPTIONS for layout in LAYOUTS}
    return [
        pytest.param(*case, marks=() if usual else pytest.mark.matrix, id=f"{case[0]}-{name_of(case[1])}")
        for case, usual in chosen.items()
    ]


GATHERED = [
    Layout(4, 1, 2, "zbv", weight=2, scatters=True),
    Layout(2, 2, 2, "1f1b", weight=2),
    Layout(4, 1, 1, weight=4),
]


def gathered_cases() -> list[object]:
    """(optimizer, layout, whether rows have owners) where replicas share weights."""
    chosen = {("lamb", GATHERED[0], True), ("adamw", GATHERED[1], False), ("lamb", GATHERED[2], False)}
    return [
        pytest.param(
            *case, marks=() if case in chosen else pytest.mark.matrix, id=f"{case[0]}-{name_of(case[1])}-{case[2]}"
        )
        for case in product(OPTIONS, GATHERED, (False, True))
    ]


def sharded_cases() -> list[object]:
    """The suite takes the largest layout, and LAMB on two replicas."""
    chosen = {(name, layout): False for name in OPTIONS for layout in (*SHARDED, Layout(data=4))}
    chosen |= {("adamw", SHARDED[-1]): True, ("lamb", SHARDED[0]): True}
    return [
        pytest.param(*case, marks=() if usual else pytest.mark.matrix, id=f"{case[0]}-{name_of(case[1])}")
        for case, usual in chosen.items()
    ]


@pytest.mark.parametrize(("optimizer", "layout"), cases())
def test_three_clipped_steps_equal_torch(ranks, optimizer: str, layout: Layout) -> None:
    require_equal(ranks, optimizer, layout, False)


@pytest.mark.parametrize(("optimizer", "layout"), sharded_cases())
def test_with_rows_that_replicas_own(ranks, optimizer: str, layout: Layout) -> None:
    require_equal(ranks, optimizer, layout, True)


@pytest.mark.parametrize(("optimizer", "layout", "rows_have_owners"), gathered_cases())
def test_with_weights_that_replicas_share(ranks, optimizer: str, layout: Layout, rows_have_owners: bool) -> None:
    require_equal(ranks, optimizer, layout, rows_have_owners)


def require_equal(ranks, optimizer: str, layout: Layout, rows_have_owners: bool) -> None:
    before, after, norms = truth(optimizer)
    assert min(norms) > 2 * CLIP, "nothing would be clipped"
    images, labels = reference.data(sum(SIZES))
    everyone = ranks(layout.world_size, train, layout, OPTIONS[optimizer], before, images, labels, rows_have_owners)
    for step, norm in enumerate(norms):
        assert all(steps[step].norm == pytest.approx(norm, rel=TOLERANCE) for steps in everyone)
    expected = from_spikingjelly(after)
    for name, value in assemble([steps[-1] for steps in everyone], "gradients").items():
        assert error(value, expected[name]) < TOLERANCE, name
