"""Imports go downward only: each part of the house may use those listed before it."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

LAYERS = [
    ["table"],
    ["files", "grid", "batching", "random", "losses", "non_finite", "optimizers", "telemetry"],
    ["schedule", "augment"],
    ["cache"],
    ["kernels"],
    ["config", "sharding", "events"],
    ["comm"],
    ["checkpoint"],
    ["process"],
    ["data"],
    ["preprocess"],
    ["parallel_state"],
    ["layers"],
    ["models"],
    ["optim", "data_parallel"],
    ["pipeline"],
    ["engine"],
    ["training"],
    ["benchmark", "convert", "pretraining"],
]
LEVEL = {part: level for level, parts in enumerate(LAYERS) for part in parts}
PACKAGE = Path(__file__).parent.parent / "megasnn"


def part_of(module: str) -> str | None:
    names = module.split(".")
    return names[1] if names[0] == "megasnn" and len(names) > 1 else None


def imports(file: Path) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            names = [f"megasnn.{alias.name}" for alias in node.names] if node.module == "megasnn" else [node.module]
            found.update(part for name in names if (part := part_of(name)))
        elif isinstance(node, ast.Import):
            found.update(part for alias in node.names if (part := part_of(alias.name)))
    return found


@pytest.mark.parametrize("file", sorted(PACKAGE.rglob("*.py")), ids=lambda f: str(f.relative_to(PACKAGE)))
def test_imports_go_downward(file: Path) -> None:
    mine = file.relative_to(PACKAGE).parts[0].removesuffix(".py")
    if mine == "__init__":
        return
    upward = {other for other in imports(file) - {mine} if LEVEL[other] > LEVEL[mine]}
    assert not upward, f"{mine} (level {LEVEL[mine]}) imports {upward}"
