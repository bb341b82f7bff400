"""The configuration: frozen dataclasses with bounds, one file for each part, and the command line made from them.

Registries stand beside their flags. Flags need the names, entries need the configuration, and neither may import torch
before the flags are checked. Entries with torch code are imported at their first use.
"""

from megasnn.config.checks import ConfigError as ConfigError
from megasnn.config.cli import parse as parse
from megasnn.config.data import DataConfig as DataConfig
from megasnn.config.neuron import NeuronConfig as NeuronConfig
from megasnn.config.optimizer import OptimizerConfig as OptimizerConfig
from megasnn.config.parallel import ParallelConfig as ParallelConfig
from megasnn.config.run import CheckpointConfig as CheckpointConfig
from megasnn.config.run import LoggingConfig as LoggingConfig
from megasnn.config.run import PretrainConfig as PretrainConfig
from megasnn.config.training import TrainingConfig as TrainingConfig
from megasnn.config.validate import validate as validate
from megasnn.config.values import changed_flags as changed_flags
from megasnn.config.values import flags_between as flags_between
from megasnn.config.values import from_dict as from_dict
from megasnn.config.values import to_json as to_json
from megasnn.config.values import with_model_name as with_model_name
