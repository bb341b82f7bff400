"""The configuration: frozen dataclasses, one file for each part, and the command line made from them."""

from megasnn.config.checkpoint import CheckpointConfig
from megasnn.config.checks import ConfigError
from megasnn.config.cli import parse
from megasnn.config.data import DataConfig
from megasnn.config.logging import LoggingConfig
from megasnn.config.model import ModelConfig, SpikformerConfig
from megasnn.config.neuron import NeuronConfig, VggNeuronConfig
from megasnn.config.optimizer import OptimizerConfig
from megasnn.config.parallel import ParallelConfig
from megasnn.config.pretrain import PretrainConfig, PretrainSpikformerConfig, PretrainVggDvsConfig
from megasnn.config.serialise import describe, from_dict, from_json, to_dict, to_json
from megasnn.config.training import TrainingConfig
from megasnn.config.validate import validate
from megasnn.config.vgg_dvs import VggDvsConfig

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
    "PretrainSpikformerConfig",
    "PretrainVggDvsConfig",
    "SpikformerConfig",
    "TrainingConfig",
    "VggDvsConfig",
    "VggNeuronConfig",
    "describe",
    "from_dict",
    "from_json",
    "parse",
    "to_dict",
    "to_json",
    "validate",
]
