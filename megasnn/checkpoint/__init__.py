"""Checkpoints of global tensors that any layout can load.

The names below are loaded when they are first used: what a checkpoint says of itself is read without torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megasnn.checkpoint.folder import Retention as Retention
    from megasnn.checkpoint.folder import find_checkpoint as find_checkpoint
    from megasnn.checkpoint.folder import first_legible as first_legible
    from megasnn.checkpoint.folder import list_checkpoints as list_checkpoints
    from megasnn.checkpoint.folder import resolve as resolve
    from megasnn.checkpoint.format import Metadata as Metadata
    from megasnn.checkpoint.format import Progress as Progress
    from megasnn.checkpoint.format import read_metadata as read_metadata
    from megasnn.checkpoint.load import LoadedState as LoadedState
    from megasnn.checkpoint.load import config_differences as config_differences
    from megasnn.checkpoint.load import load_checkpoint as load_checkpoint
    from megasnn.checkpoint.load import load_global_tensors as load_global_tensors
    from megasnn.checkpoint.load import load_globals_into as load_globals_into
    from megasnn.checkpoint.load import model_differences as model_differences
    from megasnn.checkpoint.load import other_model as other_model
    from megasnn.checkpoint.optimizer_state import LocalState as LocalState
    from megasnn.checkpoint.save import save_checkpoint as save_checkpoint
    from megasnn.checkpoint.save import save_global_tensors as save_global_tensors
    from megasnn.checkpoint.tensor_io import verify_checkpoint as verify_checkpoint
    from megasnn.checkpoint.writer import AsyncWriter as AsyncWriter
    from megasnn.checkpoint.writer import SyncWriter as SyncWriter
    from megasnn.files import CheckpointError as CheckpointError
    from megasnn.files import DamagedError as DamagedError
    from megasnn.files import NoCheckpointError as NoCheckpointError
    from megasnn.parallel.agreement import broadcast_result as broadcast_result

_NAMES = {
    "megasnn.checkpoint.folder": "Retention find_checkpoint first_legible list_checkpoints resolve",
    "megasnn.checkpoint.format": "Metadata Progress read_metadata",
    "megasnn.checkpoint.load": (
        "LoadedState config_differences load_checkpoint load_global_tensors load_globals_into model_differences "
        "other_model"
    ),
    "megasnn.checkpoint.optimizer_state": "LocalState",
    "megasnn.checkpoint.save": "save_checkpoint save_global_tensors",
    "megasnn.checkpoint.tensor_io": "verify_checkpoint",
    "megasnn.checkpoint.writer": "AsyncWriter SyncWriter",
    "megasnn.files": "CheckpointError DamagedError NoCheckpointError",
    "megasnn.parallel.agreement": "broadcast_result",
}
_MODULES = {name: module for module, names in _NAMES.items() for name in names.split()}
__all__ = list(_MODULES)


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module(_MODULES[name]), name)
    return value
