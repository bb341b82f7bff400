"""Writes docs/flags.md: every flag that all models share, what it does, and which recipes, scripts and pages use it.

python tools/flags.py > docs/flags.md
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from megasnn.config.checks import flag
from megasnn.config.cli import flag_names, help_texts
from megasnn.config.values import shown
from megasnn.models.model import run_config
from megasnn.models.spikformer.model import Spikformer

ROOT = Path(__file__).parents[1]
HEAD = """# Flags

Every flag that all models share; those of a model are in `python -m megasnn MODEL --help`. Values come from the
defaults, the recipe or file of `--config`, `--variant`, and flags; later ones win. A switch has a negative form:
`--no-shuffle`. `python tools/flags.py > docs/flags.md` writes this page.

| flag | default | what it does | used in |
|---|---|---|---|
"""


def page() -> str:
    """Text of docs/flags.md."""
    made: Any = run_config(Spikformer)
    config = made()
    pages = {file.stem: file.read_text() for file in sorted((ROOT / "docs").glob("*.md")) if file.stem != "flags"}
    scripts = {f"scripts/{file.name}": file.read_text() for file in sorted((ROOT / "scripts").glob("*.sh"))}
    recipes = {file: file.read_text() for file in sorted((ROOT / "megasnn" / "models").rglob("recipes/*.json"))}
    rows = [
        row(
            "config",
            "none",
            "A recipe by its name, or a file: config.json of a run, or some of it.",
            pages | scripts,
            {},
        )
    ]
    for part, names in flag_names(type(config)).items():
        values = getattr(config, part)
        of: Any = type(values)
        texts = help_texts(of)
        named = {f"{file.parts[-3]}/{file.stem}": {*json.loads(text).get(part, {})} for file, text in recipes.items()}
        rows += [
            row(name, shown(getattr(values, name)), texts[name], pages | scripts, named)
            for name in names
            if part != "model"
        ]
    return HEAD + "".join(rows)


def row(name: str, default: str, text: str, pages: dict[str, str], recipes: dict[str, set[str]]) -> str:
    """One row of the table."""
    used = [recipe for recipe, names in recipes.items() if name in names]
    used += [page for page, content in pages.items() if re.search(rf"{flag(name)}(?![\w-])", content)]
    cells = f"`{flag(name)}`", default, text.replace("|", "\\|"), ", ".join(used)
    return f"| {' | '.join(cells)} |\n"


if __name__ == "__main__":
    print(page(), end="")
