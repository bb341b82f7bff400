"""Runs whose samples are changed and mixed at random: no layout, number of workers or interruption alters them."""

from __future__ import annotations

import pytest
import torch

from tests.training.runs import train, whole

CHANGES = (
    "--in-channels 3 --image-size 16 --augment crop --rand-augment rand-m9-mstd0.5-inc1 "
    "--random-erasing 0.5 --mixup-alpha 0.5 --cutmix-alpha 1 --label-smoothing 0.1 --eval-iters 1"
).split()
LAYOUTS = {
    "data 2, 2 workers": (2, ("--num-workers", "2")),
    "pipeline 2": (2, ("--pipeline-model-parallel-size", "2")),
}


@pytest.fixture(scope="module")
def cache(tmp_path_factory) -> str:
    return str(tmp_path_factory.mktemp("cache"))


@pytest.fixture(scope="module")
def straight(cache) -> dict[str, torch.Tensor]:
    return whole([train(cache, "--train-iters", "3", *CHANGES, "--precision", "fp64")])


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_layout_trains_on_the_same_samples(ranks, cache, straight, name: str) -> None:
    world, flags = LAYOUTS[name]
    found = whole(ranks(world, train, cache, "--train-iters", "3", *CHANGES, "--precision", "fp64", *flags))
    for tensor, value in straight.items():
        torch.testing.assert_close(found[tensor], value, rtol=1e-9, atol=1e-9, msg=tensor)


def test_a_resumed_run_goes_on_with_the_same_bits(cache, straight, tmp_path) -> None:
    common = ("--train-iters", "3", *CHANGES, "--precision", "fp64", "--num-workers", "1")
    train(cache, *common, "--exit-interval", "2", "--save", str(tmp_path))
    resumed = whole([train(cache, *common, "--load", str(tmp_path))])
    assert all(torch.equal(resumed[name], straight[name]) for name in straight)


@pytest.mark.parametrize("loss", ["tet", "mse"])
def test_every_loss_takes_mixed_labels(cache, straight, loss: str) -> None:
    other = whole([train(cache, "--train-iters", "2", *CHANGES, "--loss", loss)])
    assert all(value.isfinite().all() for value in other.values())
