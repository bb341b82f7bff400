"""SpikingJelly's readers of recordings and its integration into frames, to compare with in benchmarks and tests.

Importing `spikingjelly.datasets` needs torchvision and matplotlib, which nothing else here does. The few functions that
are compared with need NumPy only, so they are taken out of their source files and run as they are.
"""

from __future__ import annotations

import ast
import importlib.util
import math
import struct
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Optional, Union

import numpy as np

UTILS = (
    "load_aedat_v3",
    "load_ATIS_bin",
    "integrate_events_segment_to_frame",
    "cal_fixed_frames_number_segment_index",
    "integrate_events_by_fixed_frames_number",
)
CIFAR10_DVS = (
    "_read_bits",
    "_skip_header",
    "_load_raw_events",
    "_parse_raw_address",
    "_load_events",
    "_load_origin_data",
)
CIFAR10_DVS_CONSTANTS = ("EVT_", "x_", "y_", "polarity_", "valid_")


@cache
def utils() -> SimpleNamespace:
    """The functions `UTILS` of spikingjelly/datasets/utils.py."""
    return _from_source("utils.py", lambda name: name in UTILS)


@cache
def cifar10_dvs() -> SimpleNamespace:
    """The functions `CIFAR10_DVS` of spikingjelly/datasets/cifar10_dvs.py, which read AEDAT 2.0."""
    return _from_source("cifar10_dvs.py", lambda name: name in CIFAR10_DVS or name.startswith(CIFAR10_DVS_CONSTANTS))


def _from_source(file: str, wanted: Callable[[str], bool]) -> SimpleNamespace:
    spec = importlib.util.find_spec("spikingjelly")
    if spec is None or not spec.submodule_search_locations:
        raise ImportError("spikingjelly is not installed")
    path = Path(spec.submodule_search_locations[0]) / "datasets" / file
    tree = ast.parse(path.read_text(encoding="utf-8"))
    tree.body = [node for node in tree.body if any(map(wanted, _names(node)))]
    scope: dict[str, Any] = {
        "np": np, "math": math, "struct": struct, "Path": Path, "Union": Union, "Optional": Optional,
    }  # fmt: skip
    exec(compile(tree, str(path), "exec"), scope)
    return SimpleNamespace(**scope)


def _names(node: ast.stmt) -> list[str]:
    """Of a function or of constants."""
    if isinstance(node, ast.FunctionDef):
        return [node.name]
    if isinstance(node, ast.Assign):
        return [target.id for target in node.targets if isinstance(target, ast.Name)]
    return []
