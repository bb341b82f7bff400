"""Base class of models: a dataclass whose fields are flags, with a method that yields its layers."""

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

from megasnn.config.checks import at_least
from megasnn.config.neuron import NeuronConfig
from megasnn.config.run import PretrainConfig

if TYPE_CHECKING:
    from torch import Tensor

    from megasnn.layers.layer import Layer
    from megasnn.models.arrays import ArraySpec
    from megasnn.models.weight_names import Dialect

TASK = ("inputs", "target", "loss", "metrics", "predict")


@dataclass(frozen=True, kw_only=True)
class Model(ABC):
    """The dimensions of a model. A subclass is a frozen dataclass, whose fields are flags, checked, saved with every
    checkpoint and explained by --help with the text below it, or below that of the base class.

    A built-in model imports what needs torch in its methods: flags are checked before torch is imported.

    Attributes:
        name: checkpoints keep it. By default that of the class, as a file would be called: sew_res_net of SewResNet.
        marker: name of a tensor that the model has in every size, and no other model has, so that weights which do not
            say of which model they are are known by it; None where weights always say it.
        neuron: the defaults of the flags --neuron, --tau and so on.
        loss: (output of the last layer, target) -> the loss of each sample, `[N]`; None for that of --loss.
        metrics: (output, target) -> figures by name, of each sample, `[N]`; None for the accuracy of classes.
        predict: output -> the answer for each sample, `[N, ...]`; None for the mean of the logits over time.
    """

    name: ClassVar[str]
    marker: ClassVar[str | None] = None
    neuron: ClassVar[type[NeuronConfig]] = NeuronConfig
    loss: ClassVar[Any] = None
    metrics: ClassVar[Any] = None
    predict: ClassVar[Any] = None

    image_size: int = 32
    """Height and width of the images, or of the frames."""
    in_channels: int = 3
    """Channels that images get: 1 (RGB becomes grey) or 3 (grey is repeated); frames of events have 2 polarities."""
    time_steps: int = 4
    """Simulated time steps, T. The same image is presented at each of them, or a frame of its own."""
    num_classes: int = 10
    """Number of classes."""

    def __init_subclass__(cls) -> None:
        if "name" not in cls.__dict__:
            cls.name = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", cls.__name__).lower()

    @abstractmethod
    def layers(self) -> Iterable[Layer]:
        """The layers from input to logits, each made where it is yielded (`megasnn.layer`).

        The first one takes frames `[T, N, C, H, W]`, or `[1, N, C, H, W]` for an image that is shown at every step;
        the last one gives logits `[T, N, num_classes]` of a classification, whole on every tensor parallel rank, or a
        bundle with them (`megasnn.common.bundle.logits_of`); of another task, what its `loss` takes.
        """

    @property
    def input_shape(self) -> tuple[int, ...]:
        """Shape of one sample: (C, H, W) for images, (T, C, H, W) for frames of events, which a model whose field
        `event_frames` is True takes."""
        image = self.in_channels, self.image_size, self.image_size
        return (self.time_steps, *image) if getattr(self, "event_frames", False) else image

    @property
    def inputs(self) -> Mapping[str, ArraySpec]:
        """Arrays that every sample has for the layers, which name them in `takes`; the first layer takes the first."""
        from megasnn.models.arrays import ArraySpec

        return {"images": ArraySpec(self.input_shape, over_time=len(self.input_shape) == 4)}

    @property
    def target(self) -> ArraySpec | str:
        """Target of a sample: the array that is learned, or the name of the input that is. By default a class."""
        from megasnn.models.arrays import ArraySpec

        return ArraySpec((), "int", below=self.num_classes)

    @classmethod
    def own_task(cls) -> list[str]:
        """Names in `TASK` of what the class says itself: without any, it classifies images."""
        return [name for name in TASK if getattr(cls, name) is not getattr(Model, name)]

    def problems(self, tensor_parallel: int) -> list[str]:
        """Problems of the dimensions, with value and flag; what does not divide by the tensor parallel ranks is found
        out when layers are built. A model with more to say adds it to this."""
        wrong = at_least(self, 1, "image_size", "in_channels", "time_steps", "num_classes")
        events = getattr(self, "event_frames", None)
        if events and self.in_channels != 2:
            wrong.append(f"--in-channels {self.in_channels}: event frames have two polarities; set 2")
        if events is False and self.in_channels not in (1, 3):
            wrong.append(f"--in-channels {self.in_channels}: images have 1 (grey) or 3 (RGB); set --event-frames for 2")
        return wrong

    @classmethod
    def recipes(cls) -> dict[str, Path]:
        """Configurations for `--config` by name, "spikformer/cifar10": the files of the folder `recipes` beside the
        class."""
        try:
            folder = Path(inspect.getfile(cls)).parent / "recipes"
        except (OSError, TypeError):  # a class of a program that was typed in
            return {}
        return {f"{cls.name}/{file.stem}": file for file in sorted(folder.glob("*.json"))}

    @classmethod
    def dialects(cls) -> Sequence[Dialect]:
        """The names that other programs have for the model's tensors: DIALECTS of the module `weight_names` beside that
        of the class, where there is one."""
        package = cls.__module__.rpartition(".")[0]
        if not package or find_spec(f"{package}.weight_names") is None:
            return ()
        dialects: Sequence[Dialect] = import_module(f"{package}.weight_names").DIALECTS
        return dialects

    def from_spikingjelly(self, state_dict: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """A state_dict of SpikingJelly's model under our global names. The tensors are not copied.

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
    """The class of the configuration of a run that trains a model: its dimensions, and the parts that all share.

    Raises ValueError for a class that is no dataclass, whose flags would be lost, and a field without a default.
    """
    if "__dataclass_params__" not in vars(model):
        raise ValueError(f"{model.__name__} is no dataclass: put @dataclass(frozen=True, kw_only=True) above the class")
    if without := [each.name for each in fields(model) if each.default is each.default_factory is MISSING]:
        raise ValueError(f"{model.__name__}.{without[0]} has no default, and is a flag: give it one")
    parts = [
        ("model", model, field(default_factory=model)),
        ("neuron", model.neuron, field(default_factory=model.neuron)),
    ]
    config = make_dataclass(f"Pretrain{model.__name__}", parts, bases=(PretrainConfig,), frozen=True)
    config.__doc__ = f"Pretrain {model.__name__} with data, tensor and pipeline parallelism."
    return config
