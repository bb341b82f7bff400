"""Trained models as plain modules on one device: loaded from checkpoints, traced, exported, saved."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from megasnn.checkpoint.folder import checkpoints_to_try
from megasnn.checkpoint.format import AVERAGE, Metadata, averages_of, own_names, read_metadata
from megasnn.checkpoint.load import load_globals_into
from megasnn.checkpoint.tensor_io import file_checksum, read_full
from megasnn.common.bundle import Bundle, logits_of, map_entries
from megasnn.common.files import (
    CheckpointError,
    DamagedError,
    DescriptionError,
    described,
    read_regular,
    write_whole,
)
from megasnn.config.values import CLASS_NAMES, SAMPLES_KEY
from megasnn.data.images import NORMALISATIONS
from megasnn.export.model_card import About, model_card
from megasnn.export.preprocess import Sample, preprocess
from megasnn.layers.context import BuildContext, Numerics
from megasnn.models.arrays import ArraySpec, not_finite
from megasnn.models.model import Model
from megasnn.models.registry import MODELS, saved_model
from megasnn.pipeline.chunk import build_chunks

CONFIG = "config.json"
WEIGHTS_FILE = "model.safetensors"
CARD = "README.md"


class TrainedModel(nn.Module):
    """A model for inference on one device, in evaluation mode and without gradients.

    It consists of plain torch functions, so torch.export and torch.jit.trace can follow it, for the model's T.

    Args:
        about: saved description.
        values: all weights and buffers by global name.
        model: the model's class; None to look up its name in `megasnn.MODELS`.
    Attributes:
        dtype: floating-point type for weights and computation.
    Raises:
        CheckpointError: an unknown model, impossible dimensions, or another model's weights.
    """

    def __init__(self, about: About, values: Mapping[str, Tensor], model: type[Model] | None = None) -> None:
        super().__init__()
        if model is None and about.model not in MODELS:
            raise CheckpointError(
                f"{about.model} is not in megasnn.MODELS: give its class, megasnn.load_model(..., model=MyModel)"
            )
        if model is not None and not isinstance(model, type):
            raise CheckpointError(f"model= takes the class {type(model).__name__}, not an instance")
        model = model or MODELS[about.model]
        if model.name != about.model:
            raise CheckpointError(f"it is of the model {about.model}, and model={model.__name__} is {model.name}")
        run, self.description = saved_model(about.model, model, about.config)
        is_double = any(value.dtype == torch.float64 for value in values.values())
        dtype = torch.float64 if is_double else torch.float32
        self.about = about
        self.config = run.model
        self._built_in = dtype
        numerics = Numerics(dtype, dtype, neuron_backend="torch", traceable=True)
        context = BuildContext(numerics=numerics, neuron=run.neuron.spec)
        bounds = [range(len(self.description.layers))]
        (self.chunk,) = build_chunks(self.description, bounds, [0], context, torch.device("cpu"), 0).values()
        load_globals_into(self.chunk.sharded_tensors(), values)
        self.eval().requires_grad_(False)

    @property
    def dtype(self) -> torch.dtype:
        return next((each.dtype for each in self.parameters()), self._built_in)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickles description and weights. Layers hold functions, which cannot be pickled."""
        values = self.state()
        device = next((each.device for each in values.values()), torch.device("cpu"))
        return _remade, (type(self), self.about, values, type(self.config), device, self.dtype)

    def preprocess(self, *sources: Sample) -> Tensor:
        """Inputs `[N, ...]` from image files or recordings, as the training's evaluations make them.

        A recording is read by `read_recording`; with other options, read it yourself and give the `Recording`. A file
        of finished frames ends in .frames.npz.

        Raises:
            ValueError: the model has its own inputs, the checkpoint does not say how its inputs are made, or a file
                cannot be decoded.
            OSError: a file cannot be opened.
        """
        if "inputs" in self.config.own_task():
            names = ", ".join(self.description.task.inputs)
            raise ValueError(f"{self.about.model} has its own inputs, {names}: make them as the training did")
        device = next((each.device for each in self.parameters()), None)
        return preprocess(self.config.input_shape, self.about.samples, sources).to(device, self.dtype)

    def output(self, inputs: Tensor | Mapping[str, Tensor]) -> Bundle:
        """The last layer's output.

        Args:
            inputs: tensors or NumPy arrays by name, or the only input: images `[N, C, H, W]` or event frames
                `[N, T, C, H, W]`, normalised as in training; tokens `[N, L]`, L up to the training's. N may be 0.
        Raises:
            ValueError: unknown inputs, another shape, integers for floating-point values, or infinite values or NaN.
        """
        specs = self.description.task.inputs
        if not isinstance(inputs, Mapping):
            inputs = {next(iter(specs)): inputs}
        if inputs.keys() != specs.keys():
            raise ValueError(f"the model takes a dict of its inputs, {', '.join(specs)}; got {', '.join(inputs)}")
        arrays = {name: _as_tensor(name, x) for name, x in inputs.items()}
        # Values and sizes are unknown while a compiler follows the model.
        is_followed = torch.compiler.is_exporting() or torch.compiler.is_compiling() or torch.jit.is_tracing()
        if not is_followed:
            self._check(arrays)
        without_gradients: AbstractContextManager[object] = torch.no_grad()
        if torch.compiler.is_exporting():
            # torch.export cannot load a graph with no_grad in it.
            without_gradients = nullcontext()
        with without_gradients:
            values = {name: x.to(specs[name].type_for(self.dtype)) for name, x in arrays.items()}
            has_samples = is_followed or min(map(len, values.values())) > 0
            if has_samples:
                return self.chunk(values)
            # No samples: one of zeros gives the output's shape.
            one = {name: x.new_zeros(1, *x.shape[1:]) for name, x in values.items()}
            output: Bundle = self.chunk(one)
            return map_entries(lambda y: y[:, :0], output)

    def _check(self, inputs: Mapping[str, Any]) -> None:
        """Raises ValueError for arrays that do not fit the model's inputs."""
        samples: int | None = None
        for name, spec in self.description.task.inputs.items():
            x = inputs[name]
            is_empty = isinstance(x, Tensor) and x.ndim > 0 and len(x) == 0 and not samples
            if is_empty:
                x = x.new_zeros(1, *x.shape[1:])
            problem = _of_length(spec, x).problem(name, x, samples, reads=True) or not_finite(name, x.to(self.dtype))
            if problem:
                raise ValueError(problem)
            if not is_empty:
                samples = len(x)

    def steps(self, inputs: Tensor | Mapping[str, Tensor]) -> Tensor:
        """Logits at each time step, `[T, N, classes]`."""
        return logits_of(self.output(inputs))

    def forward(self, inputs: Tensor | Mapping[str, Tensor]) -> Tensor:
        """Answers as in `Engine.predict`: mean logits `[N, classes]`, or the model's own `predict`."""
        return self.description.task.answers_of(self.output(inputs))

    def state(self) -> dict[str, Tensor]:
        """Weights and buffers by global name; a tied tensor has its owner's name."""
        return {entry.name: entry.tensor.detach() for entry in self.chunk.sharded_tensors()}

    def save_pretrained(self, folder: str | os.PathLike[str]) -> None:
        """Writes weights, description and a model card into a folder, as model hubs expect them."""
        path = Path(folder)
        path.mkdir(parents=True, exist_ok=True)
        # Copies, because safetensors refuses tensors that share memory.
        weights = {name: value.cpu().contiguous().clone() for name, value in self.state().items()}
        save_file(weights, path / WEIGHTS_FILE, {"format": "pt"})
        about = replace(self.about, crc32=file_checksum(path / WEIGHTS_FILE))
        parameters = sum(each.numel() for each in self.parameters())
        card = model_card(self.about, self.config.time_steps, self.description.task, parameters, self.dtype)
        write_whole(path / CARD, card)
        # After the weights, whose checksum it holds.
        write_whole(path / CONFIG, json.dumps(vars(about), indent=2, allow_nan=False) + "\n")

    @classmethod
    def from_pretrained(cls, folder: str | os.PathLike[str], model: type[Model] | None = None) -> TrainedModel:
        """Reads a folder written by `save_pretrained`, without running anything in it.

        Args:
            model: the model's class, if `megasnn.MODELS` lacks it.
        Raises:
            DamagedError: a file is missing, cut or altered.
            CheckpointError: see the class.
        """
        path = Path(folder)
        try:
            about = described(About, read_regular(path / CONFIG), path / CONFIG)
            if about.crc32 != file_checksum(path / WEIGHTS_FILE):
                raise DamagedError(f"{path / WEIGHTS_FILE} was altered: its checksum is not that of {CONFIG}")
            values = load_file(path / WEIGHTS_FILE)
        except (OSError, SafetensorError, DescriptionError) as error:
            raise DamagedError(f"cannot read {path}: {error}") from None
        return cls(about, values, model)


def _of_length(spec: ArraySpec, x: Any) -> ArraySpec:
    """For fewer tokens than in training: a spec of their number. A prompt grows while a text is generated."""
    if not spec.over_tokens or not isinstance(x, Tensor) or not 0 < x.shape[-1] < spec.shape[-1]:
        return spec
    return replace(spec, shape=(*spec.shape[:-1], x.shape[-1]))


def _remade(
    kind: type[TrainedModel],
    about: About,
    values: Mapping[str, Tensor],
    model: type[Model],
    device: torch.device,
    dtype: torch.dtype,
) -> TrainedModel:
    # The types that a model is built in.
    built_in = torch.float64 if dtype == torch.float64 else torch.float32
    wide = {}
    for name, x in values.items():
        wide[name] = x.to("cpu", built_in if x.is_floating_point() else x.dtype)
    return kind(about, wide, model).to(device, dtype)


def load_model(
    checkpoint: str | os.PathLike[str],
    model: type[Model] | None = None,
    step: int | None = None,
    ema: bool = True,
) -> TrainedModel:
    """Loads a checkpoint's model for inference, whatever its layout.

    Args:
        checkpoint: one checkpoint, or a run's folder for the latest one.
        model: the model's class, if `megasnn.MODELS` lacks it.
        ema: True for averaged weights, if there are any.
    Raises:
        CheckpointError: no such checkpoint, or it holds no configuration or another model.
        DamagedError: the checkpoint is damaged.
    """
    path = checkpoints_to_try(Path(checkpoint), step)[0]
    metadata = read_metadata(path)
    if metadata.model is None or metadata.config is None:
        raise CheckpointError(f"{path} holds weights without the configuration of a model: give one that a run saved")
    averaged = ema and bool(averages_of(metadata.tensors))
    names = own_names(metadata.tensors)
    prefix = AVERAGE if averaged else ""
    values = read_full(path, metadata, [prefix + name for name in names])
    about = About(metadata.model, metadata.config, _samples(metadata), _training(metadata, averaged))
    return TrainedModel(about, {name: values[prefix + name] for name in names}, model)


def _samples(metadata: Metadata) -> dict[str, Any]:
    """How the run made its inputs; empty if a user's program made them."""
    found = metadata.extra.get(SAMPLES_KEY)
    samples = dict(found) if isinstance(found, dict) else {}
    constants = samples.get("normalize_images")
    if constants in NORMALISATIONS:
        mean, std = NORMALISATIONS[constants]
        samples["mean"] = list(mean)
        samples["std"] = list(std)
    names = metadata.extra.get(CLASS_NAMES)
    if names:
        samples[CLASS_NAMES] = names
    return samples


def _training(metadata: Metadata, averaged: bool) -> dict[str, Any]:
    done: dict[str, Any] = {
        "iteration": metadata.iteration,
        "samples": metadata.consumed_samples,
        "averaged_weights": averaged,
    }
    best = metadata.extra.get("best")
    recipe = metadata.extra.get("recipe")
    if isinstance(best, dict) and best.get("iteration") == metadata.iteration:
        done["accuracy_top1"] = best.get("accuracy_top1")
    done["flags"] = recipe if isinstance(recipe, dict) else {}
    return done


def _as_tensor(name: str, array: Any) -> Any:
    """NumPy arrays with any memory and byte order become tensors. Raises ValueError unless they hold numbers."""
    if not isinstance(array, np.ndarray):
        return array
    if array.dtype.kind not in "biuf":
        raise ValueError(f"{name} is an array of {array.dtype}, and must be one of numbers")
    return torch.from_numpy(np.require(array, array.dtype.newbyteorder("="), ["C", "W"]))
