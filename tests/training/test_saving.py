"""The sentence after a run that ends early."""

from __future__ import annotations

import pytest

from megasnn.config import ConfigError, parse, validate
from megasnn.config.run import CheckpointConfig
from megasnn.models.model import run_config
from megasnn.models.spikformer.model import Spikformer
from megasnn.training.saving import how_to_go_on


def test_a_continued_run_would_refuse_the_flags_to_leave_out() -> None:
    for flags in ("--load weights.pt --no-ema", "--load a --finetune --no-ema"):
        validate(parse(run_config(Spikformer), ["--train-iters", "1", *flags.split()]), 1)
    with pytest.raises(ConfigError, match="--no-ema"):
        validate(parse(run_config(Spikformer), ["--train-iters", "1", *"--load b --save b --no-ema".split()]), 1)


def test_the_sentence_names_the_folder_and_flags_to_leave_out() -> None:
    assert how_to_go_on(CheckpointConfig(save="my runs/a"), True) == (
        "to go on, give the same command with --load 'my runs/a' --save 'my runs/a'"
    )
    tuned = CheckpointConfig(save="b", load="a", finetune=True, ckpt_step=3)
    assert how_to_go_on(tuned, True).endswith("--load b --save b, without --finetune and --ckpt-step")
    weights = CheckpointConfig(save="b", load="weights.pt", ema=False)
    assert how_to_go_on(weights, True).endswith("--load b --save b, without --no-ema")
    assert "begins anew" in how_to_go_on(CheckpointConfig(), True)
    assert "could not be written" in how_to_go_on(CheckpointConfig(save="a"), False)
