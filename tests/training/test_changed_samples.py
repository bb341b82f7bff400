"""Runs whose samples are changed and mixed at random: no layout, number of workers or interruption alters them."""

from __future__ import annotations

import torch

from tests.training.runs import train, whole

FLAGS = (
    "--in-channels 3 --image-size 16 --augment crop --rand-augment rand-m9-mstd0.5-inc1 --random-erasing 0.5 "
    "--mixup-alpha 0.5 --cutmix-alpha 1 --label-smoothing 0.1 --eval-iters 1 --train-iters 3 --precision fp64"
).split()


def test_a_layout_and_a_resumed_run_train_on_the_same_samples(ranks, cache, tmp_path) -> None:
    straight = whole([train(cache, *FLAGS)])
    piped = whole(ranks(2, train, cache, *FLAGS, "--pipeline-model-parallel-size", "2", "--num-workers", "2"))
    for name, value in straight.items():
        torch.testing.assert_close(piped[name], value, rtol=1e-9, atol=1e-9, msg=name)
    common = (*FLAGS, "--num-workers", "1")
    train(cache, *common, "--exit-interval", "2", "--save", str(tmp_path / "run"))
    resumed = whole([train(cache, *common, "--load", str(tmp_path / "run"))])
    assert all(torch.equal(resumed[name], straight[name]) for name in straight)
