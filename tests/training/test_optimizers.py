"""Runs with other optimizers than AdamW go on where they were, on any layout."""

from __future__ import annotations

import pytest

from tests.training.runs import train, whole

FLAGS = {"sgd": "--optimizer sgd --lr 0.05", "lamb": "--optimizer lamb --lr 1e-2 --weight-decay 0.05"}
TP2_PP2 = ("--tensor-model-parallel-size", "2", "--pipeline-model-parallel-size", "2")


@pytest.fixture(scope="module")
def cache(tmp_path_factory) -> str:
    return str(tmp_path_factory.mktemp("cache"))


@pytest.mark.parametrize("optimizer", FLAGS)
def test_a_run_goes_on_on_another_layout(ranks, cache, tmp_path, optimizer: str) -> None:
    common = ("--train-iters", "4", "--eval-iters", "0", "--precision", "fp64", *FLAGS[optimizer].split())
    straight = whole([train(cache, *common)])
    ranks(4, train, cache, *common, "--exit-interval", "2", "--save", str(tmp_path), *TP2_PP2)
    resumed = whole(ranks(2, train, cache, *common, "--load", str(tmp_path)))  # two replicas
    assert resumed.keys() == straight.keys()
    for name, value in straight.items():
        assert (resumed[name].double() - value.double()).norm() <= 1e-9 * value.double().norm(), name
