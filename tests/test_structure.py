"""Imports go downward only: between the parts of the house by their level, between files without circles."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

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


def run_on_import(node: ast.AST) -> Iterator[ast.AST]:
    """The statements that run when a module is imported: not those in functions, nor those for the type checker."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
            child = ast.Module(child.orelse, [])
        yield child
        yield from run_on_import(child)


def import_graph(folder: Path, root: Path) -> dict[str, set[str]]:
    """For each file under `folder`, as a module seen from `root`, the others that importing it imports first."""
    files = {".".join(file.relative_to(root).with_suffix("").parts): file for file in folder.rglob("*.py")}
    files = {name.removesuffix(".__init__"): file for name, file in files.items()}
    graph: dict[str, set[str]] = {}
    for importer, file in files.items():
        graph[importer] = set()
        for node in run_on_import(ast.parse(file.read_text())):
            for name in named(node):
                module = name if name in files else name.rpartition(".")[0]
                # The packages around the module come first; those around the importer have begun already.
                around = [module[:dot] for dot, letter in enumerate(module) if letter == "."]
                first = {package for package in around if not importer.startswith(f"{package}.")}
                graph[importer] |= ({module} | first) & files.keys() - {importer}
    return graph


def circle(graph: Mapping[str, set[str]]) -> list[str]:
    """Modules of which each imports the next one, ending with the first again; empty where there is no circle."""
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return error.args[1][::-1]
    return []


@pytest.mark.parametrize("folder", ["megasnn", "tools/benchmark"])
def test_no_circles_between_files(folder: str) -> None:
    graph = import_graph(ROOT / folder, ROOT)
    assert sum(map(len, graph.values())) > len(graph)  # imports were found
    assert not circle(graph), f"a circle of imports: {' imports '.join(circle(graph))}"


def test_what_counts_as_an_import(tmp_path: Path) -> None:
    """Two packages; `part.a` and `other.b` import each other through the name that other/__init__.py hands on."""
    files = {
        "house/__init__.py": "",
        "house/part/__init__.py": "from house.part.a import A",
        "house/part/a.py": "import os\nfrom house.other import B\nfrom house.part import c\nclass A: pass",
        "house/part/c.py": "def f():\n    from house.part.a import A",
        "house/other/__init__.py": "from house.other.b import B",
        "house/other/b.py": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from house.part.a import A",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    graph = import_graph(tmp_path / "house", tmp_path)
    assert graph["house.part.a"] == {"house.other", "house.part.c"}
    assert graph["house.part.c"] == graph["house.other.b"] == set() and circle(graph) == []
    (tmp_path / "house/other/b.py").write_text("import house.part.c")
    graph = import_graph(tmp_path / "house", tmp_path)
    assert graph["house.other.b"] == {"house.part", "house.part.c"}
    assert set(circle(graph)) == {"house.part", "house.part.a", "house.other", "house.other.b"}
