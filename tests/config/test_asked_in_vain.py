"""A flag that would have no effect is refused."""

from __future__ import annotations

import pytest

from megasnn.config import ConfigError, parse, validate
from megasnn.models.model import run_config
from megasnn.models.spikformer.dimensions import Spikformer


@pytest.mark.parametrize(
    "flags, problem",
    [
        ("--data-path x.tar --eval-interval 5", "--eval-interval 5 needs --valid-data-path"),
        ("--data-path x.tar --eval-iters 3", "--eval-iters 3 needs --valid-data-path"),
        ("--neuron-backend fused --surrogate erf", "not --surrogate erf"),
        ("--pipeline-gradient-dtype bf16", "--pipeline-gradient-dtype bf16 needs stages that send to each other"),
        (
            "--pipeline-model-parallel-size 2 --pipeline-gradient-dtype fp32 --precision fp64",
            "--pipeline-gradient-dtype fp32 with --precision fp64: gradients between stages are fp64",
        ),
        ("--precision tf32 --device cpu", "--precision tf32 is for GPUs, not --device cpu; use --precision fp32"),
        ("--check-replicas-interval 100", "--check-replicas-interval 100 compares ranks that hold the same"),
        ("--check-replicas-interval -1", "--check-replicas-interval must be at least 0, got -1"),
        ("--profile-ranks 3", "--profile-ranks 3 needs --profile-steps"),
        ("--fetch-ahead 2", "--fetch-ahead 2 is for shards behind URLs, and --data-path names none"),
        ("--data-path x.tar --fetch-timeout 5", "--fetch-timeout 5.0 is for shards behind URLs"),
        ("--crop-scale 0.2", "--crop-scale 0.2 is for --augment crop, not none"),
        ("--augment cifar --crop-ratio 2", "--crop-ratio 2.0 is for --augment crop, not cifar"),
        ("--random-erasing-mode rand", "--random-erasing-mode rand needs --random-erasing"),
        ("--mixup-off-epoch 3", "--mixup-off-epoch 3 needs --mixup-alpha or --cutmix-alpha"),
        (
            "--mixup-alpha 0.2 --cutmix-alpha 1 --micro-batch-size 1",
            "--mixup-alpha and --cutmix-alpha: samples of one micro-batch are mixed; set --micro-batch-size to 2",
        ),
        ("--train-iters none --train-samples 128 --lr-warmup-iters 100", "--lr-warmup-iters 100 is more than the 2"),
    ],
)
def test_refused(flags: str, problem: str) -> None:
    config = parse(run_config(Spikformer), ["--train-iters", "10", *flags.split()])
    with pytest.raises(ConfigError) as caught:
        validate(config, 1)
    assert problem in str(caught.value)


def test_the_same_with_an_effect_is_accepted() -> None:
    flags = "--train-iters 10 --data-path x.tar --valid-data-path y.tar --eval-interval 5 --surrogate erf"
    assert validate(parse(run_config(Spikformer), flags.split()), 1) is None
    flags = "--train-iters 10 --valid-data-path https://host/x.tar --fetch-ahead 2"
    assert validate(parse(run_config(Spikformer), flags.split()), 1) is None


def test_comparisons_need_ranks_that_hold_the_same() -> None:
    alone = "--train-iters 1 --check-replicas-interval 0".split()
    assert validate(parse(run_config(Spikformer), alone), 1) is None
