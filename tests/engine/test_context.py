"""Ranks that share micro-batches by samples or rows, from Python: steps, mixed samples, windows, refusals."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from megasnn import Engine
from tests.engine.test_engine import MODEL

SIZES = {"micro_batch_size": 4, "global_batch_size": 10, "train_iters": 8, "lr": 1e-2, "precision": "fp64"}
CP2 = {"context_parallel_size": 2}
MIXED = {"mixup_alpha": 0.4, "cutmix_alpha": 1.0, "micro_batch_size": 5}
CASES: dict[str, tuple[int, dict[str, Any], dict[str, Any]]] = {
    "stages": (4, {**CP2, "pipeline_model_parallel_size": 2, "pipeline_schedule": "zbv"}, {}),
    "mixed": (4, {**CP2, "use_distributed_optimizer": True}, MIXED),
    "windows": (2, CP2, {"bptt_steps": 1, "ema_decay": 0.5}),
    "rows": (2, {**CP2, "context_parallel_cut": "rows"}, {}),
}
"""Ranks, flags of their layout, and flags of what is computed."""


def batch(samples: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    return torch.rand(samples, *MODEL.input_shape, generator=generator), torch.randint(
        10, (samples,), generator=generator
    )


def steps(flags: dict[str, Any]) -> tuple[list[float], dict[str, Tensor]]:
    images, labels = batch(15)
    with Engine(MODEL, **{**SIZES, **flags}) as engine:
        results = [engine.train_step(images[at : at + 10], labels[at : at + 10]) for at in (0, 5)]
        record = engine.evaluate(images, labels)
        figures = [value for each in results for value in (each.loss, each.correct, each.grad_norm)]
        return [*figures, record.loss, record.top1], engine.state_dict()


@pytest.mark.parametrize("case", CASES)
def test_they_compute_what_one_rank_computes(ranks, case: str) -> None:
    size, layout, computed = CASES[case]
    ((figures, weights),) = ranks(1, steps, computed)
    for found, theirs in ranks(size, steps, {**computed, **layout}):
        assert found == pytest.approx(figures, rel=1e-9)
        for name, value in weights.items():
            assert (theirs[name] - value).double().norm() <= 1e-8 * value.double().norm(), name


def refusals(layout: dict[str, Any]) -> list[str]:
    images, labels, said = *batch(9), []
    with Engine(MODEL, **{**SIZES, **layout}) as engine:
        for act in (lambda: engine.train_step(images, labels), lambda: engine.train_step(images[:1], labels[:1])):
            with pytest.raises(ValueError) as caught:
                act()
            said.append(str(caught.value))
        assert engine.train_step(images[:8], labels[:8]).loss > 0, "nothing was changed"
    return said


@pytest.mark.parametrize(
    ("layout", "named"),
    [
        (CP2, "context_parallel_size 2"),
        ({"weight_parallel_size": 2, "global_batch_size": 16}, "weight_parallel_size 2"),
    ],
)
def test_what_cannot_be_shared_is_refused_on_every_rank(ranks, layout: dict[str, Any], named: str) -> None:
    first, second = ranks(2, refusals, layout)
    assert first == second and all(named in text for text in first)
