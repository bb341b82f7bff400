"""Ranks that share micro-batches by samples, from Python: evaluation, prediction, mixed samples, windows of time, and
what cannot be shared."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from megasnn import Engine
from megasnn.layers import ConvNormNeuron, ParallelBatchNorm
from megasnn.models.layer import layer
from megasnn.models.model import Model
from tests.engine.test_engine import MODEL
from tests.models.networks import between

SIZES = {"micro_batch_size": 4, "global_batch_size": 10, "train_iters": 8, "lr": 1e-2, "precision": "fp64"}
CP2 = {"context_parallel_size": 2}
MIXED = {"mixup_alpha": 0.4, "cutmix_alpha": 1.0}
CASES: dict[str, tuple[int, dict[str, Any], dict[str, Any]]] = {
    "stages": (4, {**CP2, "pipeline_model_parallel_size": 2, "pipeline_schedule": "zbv"}, {}),
    "mixed": (4, {**CP2, "use_distributed_optimizer": True, "micro_batch_size": 5}, {**MIXED, "micro_batch_size": 5}),
    "windows": (2, CP2, {"bptt_steps": 1, "ema_decay": 0.5}),
}
"""Ranks, flags of their layout, and flags of what is computed."""


def _batch(samples: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    images = torch.rand(samples, *MODEL.input_shape, generator=generator)
    return images, torch.randint(10, (samples,), generator=generator)


def answers(flags: dict[str, Any]) -> dict[str, Any]:
    """What an engine says of samples, few and uneven ones too, behind two steps."""
    images, labels = _batch(19)
    with Engine(MODEL, **{**SIZES, **flags}) as engine:
        steps = [engine.train_step(images[:10], labels[:10]), engine.train_step(images[5:15], labels[5:15])]
        return {
            "steps": [(each.loss, each.correct, each.grad_norm) for each in steps],
            "logits": engine.predict(images),
            "of one": engine.predict(images[18:]),
            "records": [engine.evaluate(images, labels), engine.evaluate(images[:1], labels[:1])],
            "weights": engine.state_dict(),
        }


@pytest.mark.parametrize("case", CASES)
def test_they_say_what_one_rank_says(ranks, case: str) -> None:
    size, layout, computed = CASES[case]
    (one,) = ranks(1, answers, computed)
    for found in ranks(size, answers, {**computed, **layout}):
        assert [x for step in found["steps"] for x in step] == pytest.approx([x for s in one["steps"] for x in s], 1e-9)
        assert found["of one"].shape == (1, 10)
        for name in ("logits", "of one"):
            assert (found[name] - one[name]).norm() <= 1e-9 * one[name].norm()
        for ours, theirs in zip(found["records"], one["records"], strict=True):
            assert (ours.samples, ours.top1, ours.top5) == (theirs.samples, theirs.top1, theirs.top5)
            assert ours.loss == pytest.approx(theirs.loss, 1e-9)
        for name, value in one["weights"].items():
            assert (found["weights"][name] - value).double().norm() <= 1e-8 * value.double().norm(), name


def losses(ranks_of_a_batch: int) -> list[float]:
    """Of steps on one batch, in float32."""
    images, labels = _batch(8)
    flags = {"micro_batch_size": 8, "global_batch_size": 8, "precision": "fp32", "lr_decay_style": "constant"}
    with Engine(MODEL, **{**SIZES, **flags}, context_parallel_size=ranks_of_a_batch, deterministic=True) as engine:
        return [engine.train_step(images, labels).loss for _ in range(8)]


def test_a_sample_for_each_of_eight_ranks(ranks) -> None:
    """The loss falls, and two runs give the same bits."""
    first, second = ranks(8, losses, 8), ranks(8, losses, 8)
    assert first == second and len({*map(tuple, first)}) == 1
    assert first[0][-1] < 0.8 * first[0][0]


def by_batch() -> Model:
    """With a norm that has no running statistics: in evaluation, too, it normalises by the batch."""
    norm = partial(ParallelBatchNorm, 4, track_running_stats=False)
    return between(lambda: [layer("unit", ConvNormNeuron(4, 4, 3, norm=norm()))])


def evaluated_by_batch(flags: dict[str, Any], samples: int) -> float | str:
    generator = torch.Generator().manual_seed(1)
    with Engine(by_batch(), **{**SIZES, **flags}) as engine:
        images = torch.rand(samples, *engine.config.model.input_shape, generator=generator)
        try:
            return engine.evaluate(images, torch.arange(samples) % 4).loss
        except ValueError as error:
            return str(error)


def test_a_norm_without_running_statistics(ranks) -> None:
    """It is evaluated by the whole micro-batch; with fewer samples than ranks, one would stand in for a sample."""
    (one,) = ranks(1, evaluated_by_batch, {}, 7)
    assert ranks(2, evaluated_by_batch, CP2, 7) == [pytest.approx(one, 1e-9)] * 2
    for said in ranks(2, evaluated_by_batch, CP2, 5):
        assert "of 5 samples to evaluate the last micro-batch has 1, fewer than the ranks that share it" in str(said)


def refusals() -> list[str]:
    """What is said of batches that two ranks cannot share."""
    images, labels, said = *_batch(9), []
    with Engine(MODEL, **SIZES, **CP2) as engine:
        for act in (lambda: engine.train_step(images, labels), lambda: engine.train_step(images[:1], labels[:1])):
            with pytest.raises(ValueError) as caught:
                act()
            said.append(str(caught.value))
        assert engine.train_step(images[:6], labels[:6]).loss > 0, "nothing was changed"
    return said


def test_what_cannot_be_shared_is_refused_on_every_rank(ranks) -> None:
    for said in ranks(2, refusals):
        assert "of 9 samples in micro-batches of micro_batch_size 4 the last one has 1, fewer than the" in said[0]
        assert "context_parallel_size 2, by samples" in said[1]
