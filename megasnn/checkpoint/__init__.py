"""Checkpoints of global tensors that any layout can load."""

from megasnn.checkpoint.agreement import first_decides
from megasnn.checkpoint.choice import find_checkpoint, first_legible
from megasnn.checkpoint.compare import other_model
from megasnn.checkpoint.description import Metadata, read_metadata
from megasnn.checkpoint.errors import CheckpointError, DamagedError, NoCheckpointError
from megasnn.checkpoint.folder import list_checkpoints
from megasnn.checkpoint.into_model import load_globals_into
from megasnn.checkpoint.loading import LoadedState, load_checkpoint
from megasnn.checkpoint.optimizer_state import describe
from megasnn.checkpoint.retention import Retention
from megasnn.checkpoint.saver import Saver
from megasnn.checkpoint.saving import Progress, save_checkpoint
from megasnn.checkpoint.torch_archive import read_state_dict
from megasnn.checkpoint.whole import load_global_tensors, save_global_tensors, verify_checkpoint

__all__ = [
    "CheckpointError",
    "DamagedError",
    "LoadedState",
    "Metadata",
    "NoCheckpointError",
    "Progress",
    "Retention",
    "Saver",
    "describe",
    "find_checkpoint",
    "first_decides",
    "first_legible",
    "list_checkpoints",
    "load_checkpoint",
    "load_global_tensors",
    "load_globals_into",
    "other_model",
    "read_metadata",
    "read_state_dict",
    "save_checkpoint",
    "save_global_tensors",
    "verify_checkpoint",
]
