"""Base class of models: a dataclass with flags as fields, and a method that yields layers."""

from __future__ import annotations

import inspect
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields, make_dataclass
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from megasnn.config.checks import at_least, flag
from megasnn.config.neuron import NeuronConfig
from megasnn.config.run import PretrainConfig

if TYPE_CHECKING:
    from torch import Tensor

    from megasnn.layers.layer import Layer
    from megasnn.models.arrays import ArraySpec
    from megasnn.models.weight_names import Dialect

TASK = ("inputs", "target", "loss", "metrics", "predict")
"""Members that define a model's task. A model without any classifies images."""


@dataclass(frozen=True, kw_only=True)
class Model(ABC):
    """A model's dimensions and layers.

    A subclass is a frozen dataclass. Its fields are flags, saved with checkpoints; the text below a field is its help.
    Built-in models import torch inside methods: flags are checked before torch is imported.

    Attributes:
        name: in checkpoints. Default: the class name in snake case.
        marker: a tensor name unique to this model, present at every size. Identifies weight files without a model name.
        neuron: defaults for --neuron, --tau and so on.
        unused: fields without a meaning for this model. Help leaves them out, and other values are refused.
        loss: (output, target) -> each sample's loss, `[N]`; None for --loss.
        metrics: (output, target) -> each sample's named figures, `[N]`; None for accuracy.
        predict: output -> each sample's answer, `[N, ...]`; None for the logits' mean over time.
    """

    name: ClassVar[str]
    marker: ClassVar[str | None] = None
    neuron: ClassVar[type[NeuronConfig]] = NeuronConfig
    unused: ClassVar[tuple[str, ...]] = ()
    loss: ClassVar[Any] = None
    metrics: ClassVar[Any] = None
    predict: ClassVar[Any] = None

    image_size: int = 32
    """Height and width of the images, or of the frames."""
    in_channels: int = 3
    """Channels of the images: 1 (RGB becomes grey) or 3 (grey is repeated); event frames have 2 polarities."""
    time_steps: int = 4
    """Simulated time steps, T. A sample is shown at every step; event frames have one frame per step."""
    num_classes: int = 10
    """Number of classes."""

    def __init_subclass__(cls) -> None:
        # Not inherited: a model derived from another one is another model.
        if "name" not in cls.__dict__:
            cls.name = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", cls.__name__).lower()

    @abstractmethod
    def layers(self) -> Iterable[Layer]:
        """The layers from input to logits (`megasnn.layer`), each made where it is yielded.

        The first takes frames `[T, N, C, H, W]`, or `[1, N, C, H, W]` for an image shown at every step. The last
        returns the loss's input: for classification logits `[T, N, num_classes]`, or a bundle with them.
        """

    @property
    def input_shape(self) -> tuple[int, ...]:
        """One sample's shape: (C, H, W) for images, (T, C, H, W) with `event_frames`."""
        image = (self.in_channels, self.image_size, self.image_size)
        return (self.time_steps, *image) if getattr(self, "event_frames", False) else image

    @property
    def inputs(self) -> Mapping[str, ArraySpec]:
        """A sample's input arrays. Layers name them in `takes`; the first layer takes the first input."""
        from megasnn.models.arrays import ArraySpec

        return {"images": ArraySpec(self.input_shape, over_time=len(self.input_shape) == 4)}

    @property
    def target(self) -> ArraySpec | str:
        """An array, or an input's name. Default: a class number."""
        from megasnn.models.arrays import ArraySpec

        return ArraySpec((), "int", below=self.num_classes)

    @classmethod
    def own_task(cls) -> list[str]:
        """Members of `TASK` that the class defines itself."""
        return [name for name in TASK if getattr(cls, name) is not getattr(Model, name)]

    def problems(self, tensor_parallel: int) -> list[str]:
        """Wrong dimensions, each with value and flag. Subclasses add theirs."""
        # Sizes that tensor-parallel ranks do not divide are found when layers are built.
        wrong = at_least(self, 1, "image_size", "in_channels", "time_steps", "num_classes")
        for name in self.unused:
            value = getattr(self, name)
            if value != getattr(Model, name):
                wrong.append(f"{flag(name)} {value}: {self.name} has no use for it; leave it out")
        events = getattr(self, "event_frames", None)
        if events and self.in_channels != 2:
            wrong.append(f"--in-channels {self.in_channels}: event frames have two polarities; set 2")
        if events is False and self.in_channels not in (1, 3):
            wrong.append(f"--in-channels {self.in_channels}: images have 1 (grey) or 3 (RGB); set --event-frames for 2")
        return wrong

    @classmethod
    def recipes(cls) -> dict[str, Path]:
        """Files for `--config` by name, such as "spikformer/cifar10": folder `recipes` beside the class."""
        try:
            folder = Path(inspect.getfile(cls)).parent / "recipes"
        except (OSError, TypeError):
            # A class typed into an interpreter has no file.
            return {}
        return {f"{cls.name}/{file.stem}": file for file in sorted(folder.glob("*.json"))}

    @classmethod
    def dialects(cls) -> Sequence[Dialect]:
        """Tensor names in other programs: DIALECTS in module `weight_names` beside the class, if any."""
        package = cls.__module__.rpartition(".")[0]
        if not package or find_spec(f"{package}.weight_names") is None:
            return ()
        dialects: Sequence[Dialect] = import_module(f"{package}.weight_names").DIALECTS
        return dialects

    def from_spikingjelly(self, state_dict: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """SpikingJelly's state_dict under MegaSNN's global names, without copying tensors.

        Raises:
            ValueError: SpikingJelly has no such model, or names are missing or unexpected (lists them).
        """
        from megasnn.models.weight_names import translated_tensors

        for dialect in self.dialects():
            if dialect.name == "spikingjelly":
                return translated_tensors(dialect.to_ours(state_dict), state_dict)
        raise ValueError(f"SpikingJelly has no model {self.name}; --load takes a checkpoint's folder")


@cache
def run_config(model: type[Model]) -> type[PretrainConfig]:
    """A training run's configuration class: model dimensions and neuron beside the shared parts.

    Raises ValueError for a model that is no dataclass, or a field without a default.
    """
    # Without its own decorator a class has only its base's fields: its flags would be lost.
    if "__dataclass_params__" not in vars(model):
        raise ValueError(f"{model.__name__} is no dataclass: put @dataclass(frozen=True, kw_only=True) above the class")
    for each in fields(model):
        if each.default is MISSING and each.default_factory is MISSING:
            raise ValueError(f"{model.__name__}.{each.name} has no default, and is a flag: give it one")
    parts = [
        ("model", model, field(default_factory=model)),
        ("neuron", model.neuron, field(default_factory=model.neuron)),
    ]
    config = make_dataclass(f"Pretrain{model.__name__}", parts, bases=(PretrainConfig,), frozen=True)
    # The command line shows it above the flags.
    config.__doc__ = f"Pretrain {model.__name__} with data, tensor and pipeline parallelism."
    return config
