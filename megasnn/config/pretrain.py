"""A whole run's configuration: the model's part and the shared ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from megasnn.config.checkpoint import CheckpointConfig
from megasnn.config.data import DataConfig
from megasnn.config.logging import LoggingConfig
from megasnn.config.neuron import NeuronConfig
from megasnn.config.optimizer import OptimizerConfig
from megasnn.config.parallel import ParallelConfig
from megasnn.config.training import TrainingConfig

LISTED_LAST = {"listed_last": True}
"""Metadata of a field of a model's configuration whose flag --help lists last."""
SAME_FUNCTION = {"same_function": True}
"""Metadata of a field of a model's configuration that does not change what the model computes: a checkpoint may be of
another value."""


class LayerName(NamedTuple):
    """Name of a layer.

    Attributes:
        unit: the coarser part that the layer belongs to ("patch_embed", "blocks.0", "head"); explicit layouts count
            units or layers.
        part: which part of its unit; "" where it is the only one.
    """

    unit: str
    part: str = ""

    @property
    def name(self) -> str:
        """Global name, the prefix of its parameters' names."""
        return f"{self.unit}.{self.part}" if self.part else self.unit


class ModelConfig(Protocol):
    """What the checks across parts ask of any model's configuration."""

    def layers(self) -> Sequence[LayerName]:
        """All layers, from input to output."""

    def problems(self, tensor_parallel: int) -> list[str]:
        """What is wrong with the dimensions, on so many tensor parallel ranks."""


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
