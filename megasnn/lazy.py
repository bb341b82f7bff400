"""Names of a package that are loaded when they are first used, so that what needs no torch starts without it."""

from __future__ import annotations

import ast
import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any


def lazy_names(package: str, file: str) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """`__getattr__`, `__dir__` and `__all__` of a package, made from its imports for type checkers.

    Args:
        package: `__name__` of the package.
        file: its `__file__`, which is read as text: every name that it imports from megasnn is loaded later.
    """
    modules = {
        alias.name: node.module
        for node in ast.walk(ast.parse(Path(file).read_text()))
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("megasnn.")
        for alias in node.names
        if alias.asname == alias.name
    }

    def load(name: str) -> Any:
        if name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = getattr(importlib.import_module(modules[name]), name)
        setattr(sys.modules[package], name, value)
        return value

    return load, lambda: sorted({*vars(sys.modules[package]), *modules}), sorted(modules)
