"""SpikingJelly's own readers and integration, taken out of its source files.

Importing `spikingjelly.datasets` needs torchvision and matplotlib; the few functions compared with need NumPy.
"""

from __future__ import annotations

import ast
import importlib.util
import math
import struct
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Optional, Union

import numpy as np

READERS = ("load_aedat_v3", "load_ATIS_bin")
INTEGRATION = (
    "integrate_events_segment_to_frame",
    "cal_fixed_frames_number_segment_index",
    "integrate_events_by_fixed_frames_number",
    "integrate_events_by_fixed_duration",
)


def _functions(file: str, wanted: Callable[[str], bool]) -> dict[str, Any]:
    """Functions and constants of a file in spikingjelly/datasets whose name is wanted."""
    spec = importlib.util.find_spec("spikingjelly")
    assert spec is not None and spec.submodule_search_locations
    path = Path(spec.submodule_search_locations[0]) / "datasets" / file
    tree = ast.parse(path.read_text())
    tree.body = [node for node in tree.body if any(wanted(name) for name in _names(node))]
    scope: dict[str, Any] = {
        "np": np,
        "math": math,
        "struct": struct,
        "Path": Path,
        "Union": Union,
        "Optional": Optional,
    }
    exec(compile(tree, str(path), "exec"), scope)
    return scope


def _names(node: ast.stmt) -> list[str]:
    if isinstance(node, ast.FunctionDef):
        return [node.name]
    if isinstance(node, ast.Assign):
        return [target.id for target in node.targets if isinstance(target, ast.Name)]
    return []


utils = SimpleNamespace(**_functions("utils.py", lambda name: name in READERS + INTEGRATION))
cifar10_dvs = SimpleNamespace(
    **_functions(
        "cifar10_dvs.py",
        lambda name: name.startswith(("_", "EVT_", "x_", "y_", "polarity_", "valid_")) and name[:2] != "__",
    )
)
