"""The two commands of docs/recipes.md, section "One GPU computes what eight do", ask for the same."""

from __future__ import annotations

import shlex
from pathlib import Path

from megasnn.config import validate
from megasnn.models.registry import MODELS
from megasnn.pretraining import configuration

ROOT = Path(__file__).parents[2]
SECTION = "## One GPU computes what eight do"


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
