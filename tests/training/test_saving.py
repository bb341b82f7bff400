"""The sentence after a run that ends early."""

from __future__ import annotations

from megasnn.config.run import CheckpointConfig
from megasnn.training.saving import how_to_go_on


def test_the_sentence_names_the_folder_and_flags_to_leave_out() -> None:
    assert how_to_go_on(CheckpointConfig(save="my runs/a"), True) == (
        "to go on, give the same command with --load 'my runs/a' --save 'my runs/a'"
    )
    tuned = CheckpointConfig(save="b", load="a", finetune=True, ckpt_step=3)
    assert how_to_go_on(tuned, True).endswith("--load b --save b, without --finetune, without --ckpt-step")
    assert "begins anew" in how_to_go_on(CheckpointConfig(), True)
    assert "could not be written" in how_to_go_on(CheckpointConfig(save="a"), False)
