"""Writes docs/flags.md: every flag shared by all models, with its default and help text.

python tools/flags.py > docs/flags.md
"""

from __future__ import annotations

from typing import Any

from megasnn.config.checks import flag, help_texts, shown_value
from megasnn.config.cli import flag_names
from megasnn.models.model import run_config
from megasnn.models.registry import MODELS

HEAD = """# Flags

Look up here what a flag does and its default: every flag that all models share. Those of a model are in
`python -m megasnn MODEL --help`. Values come from the defaults, the recipe or file of `--config`, and
flags; later ones win. A switch has a negative form: `--no-shuffle`. `python tools/flags.py > docs/flags.md` writes this
page.

| flag | default | |
|---|---|---|
| `--config` | none | A recipe by its name, or a file: config.json of a run, or some of it. |
"""


def page() -> str:
    """Text of docs/flags.md."""
    run_class: Any = run_config(MODELS["spikformer"])
    rows = []
    for part, names in flag_names(run_class).items():
        if part == "model":
            continue
        values = getattr(run_class(), part)
        part_class: Any = type(values)
        texts = help_texts(part_class)
        for name in names:
            text = texts[name].replace("|", "\\|")
            rows.append(f"| `{flag(name)}` | {shown_value(getattr(values, name))} | {text} |\n")
    return HEAD + "".join(rows)


if __name__ == "__main__":
    print(page(), end="")
