"""Runs on ranks that share micro-batches tell what one rank tells; runs whose samples are changed train on the same."""

from __future__ import annotations

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.training.runs import log_of, train, without_trial

FP64 = ("--precision", "fp64", "--micro-batch-size", "3", "--global-batch-size", "8")


def trained(cache: str, *flags: str) -> None:
    with without_trial():
        train(cache, *FP64, *flags)


@pytest.mark.parametrize("layout", [(), ("--context-parallel-cut", "rows", "--tensor-model-parallel-size", "2")])
def test_what_is_told_is_what_one_rank_tells(ranks, cache, tmp_path, layout: tuple[str, ...]) -> None:
    """Loss, accuracy, evaluation, and the spikes of all samples; and how micro-batches are shared."""
    common = ("--train-iters", "4", "--log-interval", "2", "--eval-interval", "2")
    trained(cache, *common, "--tensorboard-dir", str(tmp_path / "one"))
    shared = ("--context-parallel-size", "2", *layout, "--check-replicas-interval", "2")
    ranks(4, trained, cache, *common, *shared, "--tensorboard-dir", str(tmp_path / "four"))
    (one, four), (evaluated, again) = (
        [log_of(tmp_path / name, kind) for name in ("one", "four")] for kind in ("iteration", "validation")
    )
    assert len(four) == 2
    for ours, theirs in zip(four, one, strict=True):
        assert ours["loss"] == pytest.approx(theirs["loss"], 1e-9) and ours["accuracy"] == theirs["accuracy"]
        assert ours["layers"].keys() == theirs["layers"].keys() != set()
        assert any(shares["silent"] > 0 for shares in theirs["layers"].values())
        for name, shares in theirs["layers"].items():
            assert ours["layers"][name] == pytest.approx(shares, rel=1e-12), name
    for ours, theirs in zip(again, evaluated, strict=True):
        assert (ours["samples"], ours["top1"]) == (theirs["samples"], theirs["top1"])
    (start,) = log_of(tmp_path / "four", "start")
    assert start["ranks"] == 4
    events = EventAccumulator(str(tmp_path / "four")).Reload()
    for group in ("cp", "tp" if layout else "dp"):
        assert events.Scalars(f"7_communication/{group}_mb")[-1].value > 0


FLAGS = (
    "--in-channels 3 --image-size 16 --augment crop --rand-augment rand-m9-mstd0.5-inc1 --random-erasing 0.5 "
    "--mixup-alpha 0.5 --cutmix-alpha 1 --label-smoothing 0.1 --eval-iters 1 --train-iters 3 --precision fp64"
).split()


def test_a_layout_and_a_resumed_run_train_on_the_same_samples(ranks, cache, tmp_path) -> None:
    straight = train(cache, *FLAGS).tensors
    piped = ranks(2, train, cache, *FLAGS, "--pipeline-model-parallel-size", "2", "--num-workers", "2")[0].tensors
    for name, value in straight.items():
        torch.testing.assert_close(piped[name], value, rtol=1e-9, atol=1e-9, msg=name)
    common = (*FLAGS, "--num-workers", "1")
    train(cache, *common, "--exit-interval", "2", "--save", str(tmp_path / "run"))
    resumed = train(cache, *common, "--load", str(tmp_path / "run")).tensors
    assert all(torch.equal(resumed[name], straight[name]) for name in straight)
