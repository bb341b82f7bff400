"""Imports go downward: between rooms by their level, between files without a circle. Late imports count as well."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

LEVELS = [
    ["common"],
    ["telemetry"],
    ["schedule", "augment"],
    ["kernels"],
    ["config"],
    ["parallel", "parallel_state"],
    ["data"],
    ["layers"],
    ["models"],
    ["checkpoint"],
    ["optim"],
    ["pipeline"],
    ["planner"],
    ["engine"],
    ["training"],
    ["export"],
    ["pretraining"],
    ["commands", "__main__"],
]
"""Lowest first. A room imports itself and lower levels."""
LEVEL = {room: level for level, rooms in enumerate(LEVELS) for room in rooms}
ROOT = Path(__file__).parent.parent


def modules_of(root: Path) -> dict[str, Path]:
    """Files of the package by the names that imports have for them."""
    found = {}
    for file in sorted((root / "megasnn").rglob("*.py")):
        name = ".".join(file.relative_to(root).with_suffix("").parts)
        found[name.removesuffix(".__init__")] = file
    return found


def named(node: ast.AST) -> list[str]:
    """Names that an import statement gives: modules, or `module.name` for each name taken from one."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom) and node.module:
        return [f"{node.module}.{alias.name}" for alias in node.names]
    return []


def imports_of(file: Path) -> list[str]:
    """Names of all imports of a file, those in functions and under TYPE_CHECKING included."""
    return [name for node in ast.walk(ast.parse(file.read_text())) for name in named(node)]


def graph_of(modules: Mapping[str, Path]) -> dict[str, set[str]]:
    """Modules of the package that each module imports. The package itself is left out: it offers names of all rooms."""
    graph = {}
    for module, file in modules.items():
        imported = set()
        for name in imports_of(file):
            while name and name not in modules:
                name = name.rpartition(".")[0]
            imported.add(name)
        graph[module] = imported - {"", "megasnn", module}
    graph.pop("megasnn", None)
    return graph


def circle_in(graph: Mapping[str, set[str]]) -> list[str]:
    """Modules of a circle of imports, the first one again at the end; empty where there is none."""
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def upward_in(graph: Mapping[str, set[str]]) -> list[str]:
    """Imports of a room by a lower one."""

    def level(module: str) -> int:
        return LEVEL[module.split(".")[1]]

    return [
        f"{module} imports {other}"
        for module, imported in graph.items()
        for other in sorted(imported)
        if level(other) > level(module)
    ]


def test_imports_go_downward_and_in_no_circle() -> None:
    graph = graph_of(modules_of(ROOT))
    assert len(graph) > 200
    assert upward_in(graph) == []
    assert circle_in(graph) == []


def test_no_room_imports_tools_tests_or_the_package_and_lower_ones_read_no_global_state() -> None:
    modules = modules_of(ROOT)
    wrong = []
    for module, file in modules.items():
        if module in ("megasnn", "megasnn.__main__"):
            continue
        joins_ranks = module == "megasnn.parallel.process_group"  # makes the state, or takes the one that is there
        is_below = LEVEL[module.split(".")[1]] < LEVEL["engine"] and not joins_ranks
        for name in imports_of(file):
            is_global = name == "megasnn.parallel_state.get_parallel_state"
            is_package = name == "megasnn" or (name.rpartition(".")[0] == "megasnn" and name not in modules)
            if name.split(".")[0] in ("tools", "tests") or is_package or (is_below and is_global):
                wrong.append(f"{module} imports {name}")
    assert wrong == []


@pytest.mark.parametrize(
    ("text", "is_upward"),
    [
        ("from megasnn.engine.trainer import Trainer", True),
        ("def f():\n    import megasnn.engine.trainer", True),
        ("if TYPE_CHECKING:\n    from megasnn.engine import trainer", True),
        ("def f():\n    from megasnn.common.registry import Registry", False),
    ],
)
def test_late_circles_and_upward_imports_are_found(tmp_path: Path, text: str, is_upward: bool) -> None:
    """The detectors themselves."""
    for name, content in {"common/registry": text, "engine/trainer": "from megasnn.common import registry"}.items():
        file = tmp_path / "megasnn" / f"{name}.py"
        file.parent.mkdir(parents=True)
        file.write_text(content)
    graph = graph_of(modules_of(tmp_path))
    assert bool(upward_in(graph)) is is_upward
    assert bool(circle_in(graph)) is is_upward
