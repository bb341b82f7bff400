"""The two commands of docs/recipes.md, section "One GPU computes what eight do", at small dimensions."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest
import torch

from megasnn.checkpoint.load import load_global_tensors
from megasnn.config import validate
from megasnn.models.registry import MODELS
from megasnn.pretraining import configuration
from tests.parity import recipes

ROOT = Path(__file__).parents[2]
SECTION = "## One GPU computes what eight do"
# 4 ranks with a micro-batch each, or one rank with all 4 of them.
SMALL = (
    "--width 8 --image-size 32 --time-steps 2 --num-classes 5 --precision fp64 --micro-batch-size 2 "
    "--global-batch-size 8 --num-workers 0 --exit-interval 3 --log-interval 1 --eval-iters 0"
).split()
SHOWN = ("iteration", "consumed_samples", "learning_rate", "loss", "accuracy", "grad_norm")


def commands() -> list[list[str]]:
    """The words of the section's command lines, behind what starts Python."""
    text = (ROOT / "docs" / "recipes.md").read_text().split(SECTION)[1].split("```bash\n")[1].split("```")[0]
    lines = [shlex.split(line) for line in text.replace("\\\n", " ").splitlines() if line]
    return [words[words.index("megasnn") + 1 :] for words in lines]


def test_the_commands_ask_for_the_same() -> None:
    one, eight = (configuration(MODELS[words[0]], words[1:]) for words in commands())
    assert one == eight
    assert (one.training.global_batch_size, one.training.micro_batch_size) == (256, 32)
    for ranks in (1, 2, 4, 8):
        validate(one, ranks)


def logged(folder: Path) -> list[list[float]]:
    lines = map(json.loads, (folder / "log.jsonl").read_text().splitlines())
    return [[line[name] for name in SHOWN] for line in lines if line["kind"] == "iteration"]


def test_they_compute_the_same(ranks, tmp_path) -> None:
    """Three steps: the figures of the log lines and all tensors of the checkpoints, the optimizer's and the running
    statistics among them."""
    shard, found = str(recipes.shard(tmp_path, 8)), {}
    for number, words in zip((1, 4), commands(), strict=True):
        folder = tmp_path / f"on-{number}"
        name = words[words.index("--config") + 1]
        ranks(number, recipes.train_recipe, name, *words[3:], *SMALL, "--data-path", shard, "--save", str(folder))
        found[number] = logged(folder), load_global_tensors(folder, with_optimizer=True)
    (lines, tensors), (of_four, tensors_of_four) = found[1], found[4]
    assert len(lines) == 3 and [line[:2] for line in lines] == [line[:2] for line in of_four]
    for ours, theirs in zip(lines, of_four, strict=True):
        assert ours == pytest.approx(theirs, rel=1e-12)
    assert tensors.keys() == tensors_of_four.keys() and any("momentum" in name for name in tensors)
    for name, value in tensors.items():
        torch.testing.assert_close(value, tensors_of_four[name], rtol=1e-11, atol=1e-13, msg=name)
