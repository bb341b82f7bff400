"""A flag that would have no effect is refused."""

from __future__ import annotations

import pytest

from megasnn.config import ConfigError, PretrainSpikformerConfig, parse, validate


@pytest.mark.parametrize(
    "flags, problem",
    [
        ("--data-path x.tar --eval-interval 5", "--eval-interval 5 needs --valid-data-path"),
        ("--data-path x.tar --eval-iters 3", "--eval-iters 3 needs --valid-data-path"),
        ("--neuron-backend fused --surrogate erf", "not --surrogate erf"),
        ("--strict-wire", "--strict-wire needs stages that send to each other: --pipeline-model-parallel-size 2"),
        ("--pipeline-gradient-dtype bf16", "--pipeline-gradient-dtype bf16 needs stages that send to each other"),
        (
            "--pipeline-model-parallel-size 2 --pipeline-gradient-dtype fp32 --precision fp64",
            "--pipeline-gradient-dtype fp32 with --precision fp64: gradients between stages are fp64",
        ),
        ("--train-iters none --train-samples 128 --lr-warmup-iters 100", "--lr-warmup-iters 100 is more than the 2"),
    ],
)
def test_refused(flags: str, problem: str) -> None:
    config = parse(PretrainSpikformerConfig, ["--train-iters", "10", *flags.split()])
    with pytest.raises(ConfigError) as caught:
        validate(config, 1)
    assert problem in str(caught.value)


def test_the_same_with_an_effect_is_accepted() -> None:
    flags = "--train-iters 10 --data-path x.tar --valid-data-path y.tar --eval-interval 5 --surrogate erf"
    assert validate(parse(PretrainSpikformerConfig, flags.split()), 1) is None
