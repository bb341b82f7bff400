"""Checkpoints of global tensors that any layout can load, and the exchange of weights with SpikingJelly."""

from megasnn.checkpoint.agreement import first_decides
from megasnn.checkpoint.choice import find_checkpoint
from megasnn.checkpoint.description import Metadata, read_metadata
from megasnn.checkpoint.errors import CheckpointError, DamagedError, NoCheckpointError
from megasnn.checkpoint.folder import list_checkpoints
from megasnn.checkpoint.interchange import (
    from_spikingjelly,
    load_globals_into,
    read_state_dict,
    to_spikingjelly,
    vgg_from_spikingjelly,
    vgg_to_spikingjelly,
)
from megasnn.checkpoint.loading import LoadedState, load_checkpoint
from megasnn.checkpoint.retention import Retention
from megasnn.checkpoint.saver import Saver
from megasnn.checkpoint.saving import Progress, save_checkpoint
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
    "find_checkpoint",
    "first_decides",
    "from_spikingjelly",
    "list_checkpoints",
    "load_checkpoint",
    "load_global_tensors",
    "load_globals_into",
    "read_metadata",
    "read_state_dict",
    "save_checkpoint",
    "save_global_tensors",
    "to_spikingjelly",
    "verify_checkpoint",
    "vgg_from_spikingjelly",
    "vgg_to_spikingjelly",
]
