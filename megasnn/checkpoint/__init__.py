"""Checkpoints of global tensors that any layout can load, and the exchange of weights with SpikingJelly."""

from megasnn.checkpoint.errors import CheckpointError, NoCheckpointError
from megasnn.checkpoint.folder import Metadata, find_checkpoint, list_checkpoints, read_metadata
from megasnn.checkpoint.interchange import (
    from_spikingjelly,
    load_globals_into,
    read_state_dict,
    to_spikingjelly,
    vgg_from_spikingjelly,
    vgg_to_spikingjelly,
)
from megasnn.checkpoint.io import (
    LoadedState,
    load_checkpoint,
    load_global_tensors,
    save_checkpoint,
    save_global_tensors,
    saved_metadata,
)

__all__ = [
    "CheckpointError",
    "LoadedState",
    "Metadata",
    "NoCheckpointError",
    "find_checkpoint",
    "from_spikingjelly",
    "list_checkpoints",
    "load_checkpoint",
    "load_global_tensors",
    "load_globals_into",
    "read_metadata",
    "read_state_dict",
    "save_checkpoint",
    "save_global_tensors",
    "saved_metadata",
    "to_spikingjelly",
    "vgg_from_spikingjelly",
    "vgg_to_spikingjelly",
]
