"""A whole run's configuration: the model's part and the shared ones."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from megasnn.config.checkpoint import CheckpointConfig
from megasnn.config.data import DataConfig
from megasnn.config.logging import LoggingConfig
from megasnn.config.neuron import NeuronConfig
from megasnn.config.optimizer import OptimizerConfig
from megasnn.config.parallel import ParallelConfig
from megasnn.config.training import TrainingConfig


@dataclass(frozen=True)
class PretrainConfig:
    """The parts that every model shares; what does not depend on a model takes this type.

    Attributes:
        model: a `megasnn.models.model.Model`, which needs this module.
    """

    model: Any
    neuron: NeuronConfig = field(default_factory=NeuronConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    training: TrainingConfig = field(default_factory=TrainingConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    data: DataConfig = field(default_factory=DataConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    logging: LoggingConfig = field(default_factory=LoggingConfig)

    @property
    def windows(self) -> int:
        """Number of windows of time steps in which each sample is shown; 1 without --bptt-steps."""
        steps = self.training.bptt_steps
        return 1 if steps is None else int(self.model.time_steps // steps)
