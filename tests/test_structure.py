"""Imports go downward only: between the parts of the house by their level."""

from __future__ import annotations

import ast
from pathlib import Path

LAYERS = [
    ["registry", "device_checks", "recompute"],
    [
        *("files", "grid", "batching", "random", "bundle", "losses", "optimizers", "host_memory"),
        *("precisions", "telemetry"),
    ],
    ["schedule", "augment"],
    ["cache"],
    ["kernels"],
    ["config", "events"],
    ["parallel", "parallel_state"],
    ["checkpoint"],
    ["data"],
    ["preprocess"],
    ["layers"],
    ["models"],
    ["optim"],
    ["pipeline"],
    ["planner"],
    ["engine"],
    ["training"],
    ["inference"],
    ["convert", "pretraining", "pretrain"],
    ["commands", "__main__"],
]
LEVEL = {part: level for level, parts in enumerate(LAYERS) for part in parts}
ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "megasnn"


def part_of(module: str) -> str | None:
    names = module.split(".")
    return names[1] if names[0] == "megasnn" and len(names) > 1 else None


def named(node: ast.AST) -> list[str]:
    """What an import statement names: modules, or `module.name` for each name taken from one."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom) and node.module:
        return [f"{node.module}.{alias.name}" for alias in node.names]
    return []


def test_imports_go_downward() -> None:
    wrong = []
    for file in sorted(PACKAGE.rglob("*.py")):
        mine = file.relative_to(PACKAGE).parts[0].removesuffix(".py")
        for name in (name for node in ast.walk(ast.parse(file.read_text())) for name in named(node)):
            other = part_of(name)
            upward = mine != "__init__" and other is not None and LEVEL[other] > LEVEL[mine]
            # What is global is read at the top, and groups are passed below.
            below = mine != "__init__" and LEVEL[mine] < LEVEL["engine"]
            upward |= below and name == "megasnn.parallel_state.get_parallel_state"
            if upward or name.split(".")[0] in ("tools", "tests"):
                wrong.append(f"{file.relative_to(PACKAGE)} imports {name}")
    assert not wrong
