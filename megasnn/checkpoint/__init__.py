"""Checkpoints of global tensors that any layout can load.

The names below are loaded when they are first used: what a checkpoint says of itself is read without torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from megasnn.lazy import lazy_names

if TYPE_CHECKING:  # where each name comes from, for type checkers and for `lazy_names`
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

__getattr__, __dir__, __all__ = lazy_names(__name__, __file__)
