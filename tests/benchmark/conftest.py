"""The program under test, loaded from its file."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest


@pytest.fixture(scope="module")
def program() -> ModuleType:
    path = Path(__file__).parents[2] / "tools" / "benchmark.py"
    spec = importlib.util.spec_from_file_location("benchmark_program", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
