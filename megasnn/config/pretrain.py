"""A whole run's configuration: the model's part and the shared ones."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol

from megasnn.config.checkpoint import CheckpointConfig
from megasnn.config.data import DataConfig
from megasnn.config.logging import LoggingConfig
from megasnn.config.neuron import NeuronConfig
from megasnn.config.optimizer import OptimizerConfig
from megasnn.config.parallel import ParallelConfig
from megasnn.config.training import TrainingConfig

SAME_FUNCTION = {"same_function": True}
"""Metadata of a field of a model's configuration that does not change what the model computes: a checkpoint may be of
another value."""


class ModelConfig(Protocol):
    """Interface of any model's configuration for rooms below the models; see `megasnn.models.model.Model`."""

    name: ClassVar[str]
    """Under which checkpoints know the model."""
    neuron: ClassVar[type[NeuronConfig]]
    """With the defaults of the model's neuron."""

    @property
    def time_steps(self) -> int:
        """T."""

    @property
    def num_classes(self) -> int:
        """Number of classes."""

    @property
    def input_shape(self) -> tuple[int, ...]:
        """Shape of one sample."""

    def layers(self) -> Iterable[Any]:
        """The layers (`megasnn.models.layer.Layer`) from input to logits."""

    def units(self) -> list[str]:
        """The unit of each layer, from input to output."""

    def problems(self, tensor_parallel: int) -> list[str]:
        """Problems of the dimensions, on so many tensor parallel ranks."""

    def from_spikingjelly(self, state_dict: Mapping[str, Any]) -> dict[str, Any]:
        """A state_dict of SpikingJelly's model under our global names."""


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

    @property
    def windows(self) -> int:
        """Number of windows of time steps in which each sample is shown; 1 without --bptt-steps."""
        steps = self.training.bptt_steps
        return 1 if steps is None else self.model.time_steps // steps
