"""An entry of the table of models: what the rest of the code asks of a model."""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Generic, TypeVar

from megasnn.config.pretrain import ModelConfig, PretrainConfig

if TYPE_CHECKING:
    from torch import Tensor

    from megasnn.kernels import NeuronSpec
    from megasnn.models.description import ModelDescription
    from megasnn.models.names import Dialect

Dimensions = TypeVar("Dimensions", bound=ModelConfig)


class ModelEntry(ABC, Generic[Dimensions]):
    """One model. Flags are checked before torch is imported, so the methods import what needs torch themselves.

    Attributes:
        name: of the model's folder; checkpoints keep it.
        config: class of the configuration of a run that trains the model.
        marker: name of a tensor that the model has in every size, and no other model has. By it, weights that do not
            say of which model they are are known.
    """

    name: ClassVar[str]
    config: ClassVar[type[PretrainConfig]]
    marker: ClassVar[str]

    @abstractmethod
    def describe(self, dimensions: Dimensions, neuron: NeuronSpec) -> ModelDescription:
        """The layers of a model with these dimensions and neurons."""

    @property
    def recipes(self) -> dict[str, Path]:
        """Configurations for `--config` by name, "spikformer/cifar10": the files of the folder `recipes` beside the
        class."""
        folder = Path(inspect.getfile(type(self))).parent / "recipes"
        return {f"{self.name}/{file.stem}": file for file in sorted(folder.glob("*.json"))}

    def dialects(self) -> Sequence[Dialect]:
        """The names that other programs have for the model's tensors."""
        return ()

    def from_spikingjelly(self, dimensions: Dimensions, state_dict: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """A state_dict of SpikingJelly's model under our global names. The tensors are not copied.

        Raises:
            ValueError: SpikingJelly has no such model, or names are missing or unexpected (lists them).
        """
        raise ValueError(f"SpikingJelly has no model {self.name}; leave --load-spikingjelly out")
