"""A whole run's configuration: the model's part and the shared ones."""

from __future__ import annotations

from dataclasses import dataclass, field

from megasnn.config.checkpoint import CheckpointConfig
from megasnn.config.data import DataConfig
from megasnn.config.logging import LoggingConfig
from megasnn.config.model import ModelConfig, SpikformerConfig
from megasnn.config.neuron import NeuronConfig, VggNeuronConfig
from megasnn.config.optimizer import OptimizerConfig
from megasnn.config.parallel import ParallelConfig
from megasnn.config.training import TrainingConfig
from megasnn.config.vgg_dvs import VggDvsConfig


@dataclass(frozen=True)
class PretrainConfig:
    """The parts that every model shares; what does not depend on a model takes this type."""

    model: ModelConfig
    neuron: NeuronConfig = field(default_factory=NeuronConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    training: TrainingConfig = field(default_factory=TrainingConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    data: DataConfig = field(default_factory=DataConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    logging: LoggingConfig = field(default_factory=LoggingConfig)


@dataclass(frozen=True)
class PretrainSpikformerConfig(PretrainConfig):
    """Pretrain Spikformer with data, tensor and pipeline parallelism."""

    model: SpikformerConfig = field(default_factory=SpikformerConfig)


@dataclass(frozen=True)
class PretrainVggDvsConfig(PretrainConfig):
    """Pretrain the VGG for event cameras with data, tensor and pipeline parallelism."""

    model: VggDvsConfig = field(default_factory=VggDvsConfig)
    neuron: VggNeuronConfig = field(default_factory=VggNeuronConfig)
