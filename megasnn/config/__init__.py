"""The configuration: frozen dataclasses, one file for each part, and the command line made from them."""

from megasnn.config.checkpoint import CheckpointConfig
from megasnn.config.checks import ConfigError
from megasnn.config.cli import parse
from megasnn.config.data import DataConfig
from megasnn.config.logging import LoggingConfig
from megasnn.config.neuron import NeuronConfig
from megasnn.config.optimizer import OptimizerConfig
from megasnn.config.parallel import ParallelConfig
from megasnn.config.pretrain import ModelConfig, PretrainConfig
from megasnn.config.serialise import (
    changed_flags,
    comparable_flags,
    describe,
    flags_between,
    from_dict,
    from_json,
    to_dict,
    to_json,
)
from megasnn.config.training import TrainingConfig
from megasnn.config.validate import validate

__all__ = [
    "CheckpointConfig",
    "ConfigError",
    "DataConfig",
    "LoggingConfig",
    "ModelConfig",
    "NeuronConfig",
    "OptimizerConfig",
    "ParallelConfig",
    "PretrainConfig",
    "TrainingConfig",
    "changed_flags",
    "comparable_flags",
    "describe",
    "flags_between",
    "from_dict",
    "from_json",
    "parse",
    "to_dict",
    "to_json",
    "validate",
]
