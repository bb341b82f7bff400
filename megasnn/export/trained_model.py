"""Trained models as plain modules on one device: load a checkpoint, predict, trace, export, save as a folder."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import torch
from pydantic import Field, with_config
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from megasnn.checkpoint.folder import resolve
from megasnn.checkpoint.format import AVERAGE, BESIDE, Metadata, read_metadata
from megasnn.checkpoint.load import load_globals_into
from megasnn.checkpoint.tensor_io import file_checksum, read_full
from megasnn.common.bundle import Bundle, logits_of, map_entries
from megasnn.common.files import (
    STRICT,
    CheckpointError,
    DamagedError,
    DescriptionError,
    FreeForm,
    described,
    read_regular,
    write_whole,
)
from megasnn.config.values import CLASS_NAMES, SAMPLES_KEY
from megasnn.data.images import NORMALISATIONS
from megasnn.layers import BuildContext
from megasnn.models.arrays import not_finite
from megasnn.models.model import Model
from megasnn.models.registry import MODELS, saved_model
from megasnn.pipeline.chunk import build_chunks

CONFIG, WEIGHTS, CARD = "config.json", "model.safetensors", "README.md"


@with_config(STRICT)
@dataclass(frozen=True)
class About:
    """Content of config.json.

    Attributes:
        model: name of the model.
        config: dimensions and neuron, {"model": {...}, "neuron": {...}}.
        samples: preprocessing of the run: "mean" and "std" of each channel, for pixels from 0 to 1; "class_names" by
            number, if the data had names.
        training: iteration, flags of the run, and accuracy if known.
        crc32: checksum of the weights file; empty outside of a folder.
        format: version of this file format.
    """

    model: str
    config: dict[str, FreeForm]
    samples: FreeForm = field(default_factory=dict)
    training: FreeForm = field(default_factory=dict)
    crc32: Annotated[str, Field(pattern="^([0-9a-f]{8})?$")] = ""
    format: Literal[1] = 1


class TrainedModel(nn.Module):
    """Trained model for inference on one device, in evaluation mode and without gradients.

    It consists of torch functions only, so torch.export and torch.jit.trace work, for the T of the model.

    Args:
        about: description of the model.
        values: all weights and buffers by global name.
        model: class of the model; None looks it up in `megasnn.MODELS`.
    Attributes:
        config: dimensions of the model.
        description: layers of the model.
    Raises:
        CheckpointError: unknown model, impossible dimensions, or weights of another model.
    """

    def __init__(self, about: About, values: Mapping[str, Tensor], model: type[Model] | None = None) -> None:
        super().__init__()
        if model is None and about.model not in MODELS:
            raise CheckpointError(
                f"{about.model} is not in megasnn.MODELS: give its class, megasnn.load_model(..., model=MyModel)"
            )
        if model is not None and not isinstance(model, type):
            raise CheckpointError(f"model= takes the class of the model, {type(model).__name__}, and not one of it")
        model = model or MODELS[about.model]
        if model.name != about.model:
            raise CheckpointError(f"it is of the model {about.model}, and model={model.__name__} is {model.name}")
        run, self.description = saved_model(about.model, model, about.config)
        is_double = any(value.dtype == torch.float64 for value in values.values())
        dtype = torch.float64 if is_double else torch.float32
        self.about, self.config, self._built_in = about, run.model, dtype
        context = BuildContext(
            dtype=dtype, compute_dtype=dtype, neuron_backend="torch", neuron=run.neuron.spec, traceable=True
        )
        bounds = [range(len(self.description.layers))]
        (self.chunk,) = build_chunks(self.description, bounds, [0], context, torch.device("cpu"), 0).values()
        load_globals_into(self.chunk.sharded_tensors(), values)
        self.eval().requires_grad_(False)

    @property
    def dtype(self) -> torch.dtype:
        """Type of the weights and of the computation."""
        return next((each.dtype for each in self.parameters()), self._built_in)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickles description and weights only, because layers hold functions, which pickle refuses."""
        values = self.state()
        device = next((each.device for each in values.values()), torch.device("cpu"))
        return _remade, (type(self), self.about, values, type(self.config), device, self.dtype)

    def output(self, inputs: Tensor | Mapping[str, Tensor]) -> Bundle:
        """Computes the output of the last layer.

        Args:
            inputs: images `[N, C, H, W]` or event frames `[N, T, C, H, W]`, normalised as in training; a dict by name
                for a model with several inputs. Tensors or NumPy arrays; N may be 0.
        Returns:
            Tensor `[T, N, ...]`, or several by name.
        Raises:
            ValueError: other names or shapes, integers in place of floating-point values, or nan or infinite values.
        """
        specs = self.description.task.inputs
        named = inputs if isinstance(inputs, Mapping) else {next(iter(specs)): inputs}
        if named.keys() != specs.keys():
            raise ValueError(f"the model takes a dict of its inputs, {', '.join(specs)}; got {', '.join(named)}")
        named = {name: _of_numpy(name, x) if isinstance(x, np.ndarray) else x for name, x in named.items()}
        is_followed = torch.compiler.is_exporting() or torch.compiler.is_compiling() or torch.jit.is_tracing()
        if not is_followed:  # tracing knows neither values nor sizes
            named = self._checked(named)
        # torch.export cannot load a program that contains no_grad.
        with nullcontext() if torch.compiler.is_exporting() else torch.no_grad():
            values = {name: x.to(specs[name].type_for(self.dtype)) for name, x in named.items()}
            has_samples = is_followed or min(map(len, values.values())) > 0
            if not has_samples:
                values = {name: x.new_zeros(1, *x.shape[1:]) for name, x in values.items()}
            output: Bundle = self.chunk(values)
            return output if has_samples else map_entries(lambda y: y[:, :0], output)

    def _checked(self, inputs: Mapping[str, Any]) -> Mapping[str, Tensor]:
        samples: int | None = None
        for name, spec in self.description.task.inputs.items():
            x = inputs[name]
            is_empty = isinstance(x, Tensor) and x.ndim > 0 and len(x) == 0 and not samples
            read = x.new_zeros(1, *x.shape[1:]) if is_empty else x
            if problem := spec.problem(name, read, samples, reads=True) or not_finite(name, read.to(self.dtype)):
                raise ValueError(problem)
            samples = None if is_empty else len(x)
        return inputs

    def steps(self, inputs: Tensor | Mapping[str, Tensor]) -> Tensor:
        """Computes the logits of each time step, `[T, N, classes]`. Arguments and errors as `output`."""
        return logits_of(self.output(inputs))

    def forward(self, inputs: Tensor | Mapping[str, Tensor]) -> Tensor:
        """Computes the answers, as `Engine.predict`: logits `[N, classes]`, or the model's own `predict`.

        Arguments and errors as `output`.
        """
        return self.description.task.answers_of(self.output(inputs))

    def state(self) -> dict[str, Tensor]:
        """Returns weights and buffers by global name; a tied tensor has the name of its owner."""
        return {entry.name: entry.tensor.detach() for entry in self.chunk.sharded_tensors()}

    def save_pretrained(self, folder: str | os.PathLike[str]) -> None:
        """Writes model.safetensors, config.json and a model card (README.md) into a folder, as model hubs expect."""
        path = Path(folder)
        path.mkdir(parents=True, exist_ok=True)
        weights = {name: value.cpu().contiguous().clone() for name, value in self.state().items()}
        save_file(weights, path / WEIGHTS, {"format": "pt"})
        about = replace(self.about, crc32=file_checksum(path / WEIGHTS))
        write_whole(path / CARD, _card(self))
        write_whole(path / CONFIG, json.dumps(vars(about), indent=2, allow_nan=False) + "\n")

    @classmethod
    def from_pretrained(cls, folder: str | os.PathLike[str], model: type[Model] | None = None) -> TrainedModel:
        """Loads a folder that `save_pretrained` wrote. Runs no code from it.

        Args:
            folder: the folder.
            model: class of the model; None looks it up in `megasnn.MODELS`.
        Raises:
            DamagedError: a file is missing, cut or altered.
            CheckpointError: unknown model, or weights of another model.
        """
        path = Path(folder)
        try:
            about = described(About, read_regular(path / CONFIG), path / CONFIG)
            if about.crc32 != file_checksum(path / WEIGHTS):
                raise DamagedError(f"{path / WEIGHTS} was altered: its checksum is not that of {CONFIG}")
            values = load_file(path / WEIGHTS)
        except (OSError, SafetensorError, DescriptionError) as error:
            raise DamagedError(f"cannot read {path}: {error}") from None
        return cls(about, values, model)


def _remade(
    kind: type[TrainedModel],
    about: About,
    values: Mapping[str, Tensor],
    model: type[Model],
    device: torch.device,
    dtype: torch.dtype,
) -> TrainedModel:
    """Rebuilds a pickled model. Layers are built in float32 or float64, and other types are converted afterwards."""
    built_in = torch.float64 if dtype == torch.float64 else torch.float32
    wide = {name: x.to("cpu", built_in if x.is_floating_point() else x.dtype) for name, x in values.items()}
    return kind(about, wide, model).to(device, dtype)


def load_model(
    checkpoint: str | os.PathLike[str],
    model: type[Model] | None = None,
    step: int | None = None,
    ema: bool = True,
) -> TrainedModel:
    """Loads a checkpoint of any layout as a model for inference.

    Args:
        checkpoint: folder of a run (its latest checkpoint), or one checkpoint in it.
        model: class of the model; None looks it up in `megasnn.MODELS`.
        step: iteration of the checkpoint.
        ema: load the average of the weights if there is one; False loads the weights.
    Raises:
        DamagedError: files are missing, cut or altered.
        CheckpointError: no such checkpoint, no configuration in it, or another model.
    """
    path = resolve(Path(checkpoint), step)[0]
    metadata = read_metadata(path)
    if metadata.model is None or metadata.config is None:
        raise CheckpointError(f"{path} holds weights without the configuration of a model: give one that a run saved")
    averaged = ema and any(name.startswith(AVERAGE) for name in metadata.tensors)
    names = [name for name in metadata.tensors if not name.startswith(BESIDE)]
    saved = {name: AVERAGE + name if averaged else name for name in names}
    values = read_full(path, metadata, saved.values())
    about = About(metadata.model, metadata.config, _samples(metadata), _training(metadata, averaged))
    return TrainedModel(about, {name: values[saved[name]] for name in names}, model)


def _samples(metadata: Metadata) -> dict[str, Any]:
    """Preprocessing of the run; empty if an Engine trained the model."""
    found = metadata.extra.get(SAMPLES_KEY)
    samples = dict(found) if isinstance(found, dict) else {}
    if (constants := samples.get("normalize_images")) in NORMALISATIONS:
        samples["mean"], samples["std"] = map(list, NORMALISATIONS[constants])
    if names := metadata.extra.get(CLASS_NAMES):
        samples[CLASS_NAMES] = names
    return samples


def _training(metadata: Metadata, averaged: bool) -> dict[str, Any]:
    done: dict[str, Any] = {
        "iteration": metadata.iteration,
        "samples": metadata.consumed_samples,
        "averaged_weights": averaged,
    }
    best, recipe = metadata.extra.get("best"), metadata.extra.get("recipe")
    if isinstance(best, dict) and best.get("iteration") == metadata.iteration:
        done["accuracy_top1"] = best.get("accuracy_top1")
    return {**done, "flags": recipe if isinstance(recipe, dict) else {}}


def _card(model: TrainedModel) -> str:
    """Text of the model card, with the header that model hubs read."""
    about, config, task = model.about, model.config, model.description.task
    shapes = {name: ["N", *each.shape] for name, each in task.inputs.items()}
    inputs: object = shapes if len(shapes) > 1 else next(iter(shapes.values()))
    flags, top1 = about.training.get("flags"), about.training.get("accuracy_top1")
    accuracy_text = "not known" if top1 is None else f"{top1:.2%}, in training, on its validation data"
    return _CARD.format(
        name=about.model,
        parameters=f"{sum(each.numel() for each in model.parameters()):,}",
        dtype=str(model.dtype).removeprefix("torch."),
        time_steps=config.time_steps,
        tag="image-classification" if task.classes else "other",
        inputs=str(inputs).replace("'N'", "N"),
        answers=", ".join(map(str, ["N", *task.answer.shape])),
        samples=json.dumps(about.samples) if about.samples else "by the program that trained it, which says how",
        call="logits = model(images)" if task.classes and len(shapes) == 1 else "answers = model(inputs)",
        accuracy=f"- Accuracy (top-1): {accuracy_text}.\n" if task.classes else "",
        dimensions=json.dumps(about.config),
        training=json.dumps({name: value for name, value in about.training.items() if name != "flags"}),
        flags=json.dumps(flags),
    )


_CARD = """\
---
library_name: megasnn
pipeline_tag: {tag}
tags:
- spiking-neural-network
- {name}
---

# {name}

A spiking neural network trained with MegaSNN: {parameters} parameters ({dtype}), T = {time_steps}.

```python
import megasnn

model = megasnn.TrainedModel.from_pretrained("this folder")  # a class of your own: model=CLASS
{call}  # {inputs} -> [{answers}]
```

- Inputs: {samples}. Pixels are scaled to 0 to 1; then `mean` is subtracted, and the rest divided by `std`.
{accuracy}- Dimensions and neuron: {dimensions}
- Training: {training}
- Flags: {flags}
"""


def _of_numpy(name: str, array: np.ndarray) -> Tensor:
    """Converts an array of any memory and byte order."""
    if array.dtype.kind not in "biuf":
        raise ValueError(f"{name} is an array of {array.dtype}, and must be one of numbers")
    return torch.from_numpy(np.require(array, array.dtype.newbyteorder("="), ["C", "W"]))
