"""Batches of which each rank reads its own samples: the same steps and evaluations as with whole batches."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from megasnn import Engine
from tests.engine.test_engine import MODEL, PP2, SIZES
from tests.training.runs import without_trial

SAMPLES = 23
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "one": (1, {}),
    "replicas": (2, {}),
    "tensor": (2, {"tensor_model_parallel_size": 2}),
    "stages": (2, {"pipeline_model_parallel_size": 2, "pipeline_schedule": "zbv"}),
    "samples": (2, {"context_parallel_size": 2}),
    "mixed": (2, {"context_parallel_size": 2, "mixup_alpha": 0.3}),
    "stages and replicas": (4, PP2),
}


class Read:
    """Samples by number, and the numbers that were asked for."""

    def __init__(self) -> None:
        self.images = torch.rand(SAMPLES, *MODEL.input_shape, generator=torch.Generator().manual_seed(0))
        self.labels = torch.arange(SAMPLES) % 10
        self.numbers: list[int] = []

    def __call__(self, numbers: list[int]) -> tuple[Tensor, Tensor]:
        self.numbers += numbers
        return self.images[numbers], self.labels[numbers]


def trained(flags: dict[str, Any], shares: bool) -> tuple[list[float], float, list[int]]:
    """Losses of two steps, the loss of an evaluation of all samples, and the numbers of the samples read."""
    read = Read()
    order = torch.randperm(SAMPLES, generator=torch.Generator().manual_seed(1)).tolist()
    batches = [order[:10], order[10:20]]
    evaluated = [list(range(first, min(first + 10, SAMPLES))) for first in range(0, SAMPLES, 10)]
    with without_trial(), Engine(MODEL, **{**SIZES, "precision": "fp64", **flags}) as engine:
        losses = []
        for batch in batches:
            share = engine.share(batch) if shares else None
            images, labels = read(batch if share is None else share.indices)
            losses.append(engine.train_step(images, labels, share=share).loss)
        used = [*read.numbers]
        if shares:
            own = [engine.share(batch, evaluates=True) for batch in evaluated]
            record = engine.evaluate((*read(each.indices), each) for each in own)
        else:
            record = engine.evaluate(read(batch) for batch in evaluated)
        assert record.samples == SAMPLES
        return losses, record.loss, used


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_share_gives_the_bits_of_the_whole_batch(ranks, name: str) -> None:
    size, flags = LAYOUTS[name]
    whole = ranks(size, trained, flags, False)
    shared = ranks(size, trained, flags, True)
    assert [each[:2] for each in shared] == [each[:2] for each in whole]
    read = [len(each[2]) for each in shared]
    due = {"one": [20], "tensor": [20, 20], "stages": [20, 20], "mixed": [20, 20]}
    if name in due:  # mixing needs the whole micro-batch
        assert read == due[name]
    else:
        assert max(read) < 20
        replicas = {tuple(each[2]) for each in shared}
        assert sorted(number for numbers in replicas for number in numbers) == sorted(whole[0][2])


def test_shares_that_do_not_fit_are_refused_and_the_engine_goes_on() -> None:
    read = Read()
    with without_trial(), Engine(MODEL, **SIZES) as engine:
        share = engine.share(torch.arange(5))
        assert share.indices == [0, 1, 2, 3, 4]
        with pytest.raises(ValueError, match=r"\[5, 1, 8, 8\].*got \[4, 1, 8, 8\]"):
            engine.train_step(*read([0, 1, 2, 3]), share=share)
        with pytest.raises(ValueError, match=r"for a training step: take engine.share\(batch, evaluates=True\)"):
            engine.evaluate(*read(share.indices), share=share)
        with pytest.raises(ValueError, match=r"for an evaluation: take engine.share\(batch\)"):
            engine.train_step(*read(share.indices), share=engine.share(range(5), evaluates=True))
        with pytest.raises(ValueError, match="share must come from engine.share, not be a list"):
            engine.train_step(*read([1]), share=[1])
        for batch, evaluates in (([], False), (range(11), True)):
            with pytest.raises(ValueError, match=f"not of {len(batch)}"):
                engine.share(batch, evaluates)
        assert engine.train_step(*read(share.indices), share=share).loss > 0
