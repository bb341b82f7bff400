"""Weights to and from other programs: a module for each model and program, with its names, and what they share."""

from megasnn.checkpoint.interchange.dialects import dialect_for, dialect_of, is_ours
from megasnn.checkpoint.interchange.into_model import load_globals_into
from megasnn.checkpoint.interchange.spikformer import from_spikingjelly, to_spikingjelly
from megasnn.checkpoint.interchange.state_dict import read_state_dict
from megasnn.checkpoint.interchange.vgg_dvs import vgg_from_spikingjelly, vgg_to_spikingjelly

__all__ = [
    "dialect_for",
    "dialect_of",
    "from_spikingjelly",
    "is_ours",
    "load_globals_into",
    "read_state_dict",
    "to_spikingjelly",
    "vgg_from_spikingjelly",
    "vgg_to_spikingjelly",
]
