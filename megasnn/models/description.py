"""Description of a model before it exists: its layers' names and what they give, and how they are built for a rank."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import nn

from megasnn.bundle import Bundle, Key
from megasnn.kernels.neuron_spec import NeuronSpec
from megasnn.kernels.spike_codec import Content, encoded_like
from megasnn.layers.context import BuildContext
from megasnn.parallel.sharding import ShardedTensor

if TYPE_CHECKING:
    from megasnn.models.layer import Layer
    from megasnn.models.task import Task

DRY_SAMPLES = 2  # of the dry run: a norm in training needs more than one value


Cuts = Sequence[bool]
"""Tells for each of some tensors `[T, N, C, ...]` if tensor parallel ranks have their own channels; else all of it."""


class Built(NamedTuple):
    """Layer that is built for a rank, on the meta device.

    Attributes:
        output: of a dry run with `DRY_SAMPLES` samples.
        operations: multiply-adds in a sample's forward, as far as they were counted.
    """

    layer: Layer
    output: Bundle
    operations: int = 0

    @property
    def name(self) -> str:
        return self.layer.name

    @property
    def module(self) -> nn.Module:
        return self.layer.module


@dataclass(frozen=True)
class EntryDescription:
    """One tensor of an output.

    Attributes:
        content: what it is known to hold, which decides how it crosses to another stage.
        shape: that of the dry run, of `DRY_SAMPLES` samples and one rank.
    """

    content: Content
    shape: tuple[int, ...]


@dataclass(frozen=True)
class LayerDescription:
    """
    Attributes:
        name: global name, the prefix of its parameters' names.
        unit: the coarser part that it belongs to ("patch_embed", "blocks.0", "head"), for explicit layouts (not the
            unit of a schedule, which is a layer or a chunk: megasnn/schedule/actions.py).
        entries: tensors of its output; one without a key is no bundle.
        takes: names of the layers whose outputs are its inputs, and of inputs of the model; empty: the layer before it.
        parameters: number of their elements.
        operations: multiply-adds in a sample's forward: of convolutions, linear layers and products of matrices, each
            as often as it is computed here (of an image that all time steps see, once).
    """

    name: str
    unit: str
    entries: Mapping[Key, EntryDescription]
    takes: tuple[str, ...] = ()
    parameters: int = 0
    operations: int = 0

    def output_shapes(self, samples: int) -> list[tuple[int, ...]]:
        return [(each.shape[0], samples, *each.shape[2:]) for each in self.entries.values()]

    def output_bytes(self, samples: int, dtype: torch.dtype) -> int:
        """Bytes of its output, packed as it travels and is kept."""
        sizes = [torch.Size(shape).numel() for shape in self.output_shapes(samples)]
        contents = [entry.content for entry in self.entries.values()]
        meta = torch.device("meta")
        return sum(encoded_like(*each, dtype, meta).nbytes for each in zip(sizes, contents, strict=True))


@dataclass(frozen=True)
class Tie:
    """A tensor that a layer has a copy of.

    Attributes:
        name: global name of the tensor.
        owner, copy: names of the layer that it is counted, stepped and saved with, and of the one with the copy.
    """

    name: str
    owner: str
    copy: str


@dataclass(frozen=True)
class Carried:
    """A tensor that a boundary between stages carries: an entry of the output of a layer, by its number. The model's
    inputs have the numbers -1, -2 and so on."""

    layer: int
    key: Key
    content: Content
    name: str


@dataclass(frozen=True)
class ModelDescription:
    """
    Attributes:
        layers: from input to logits.
        task: inputs, target, loss and metrics.
        build: makes all layers for a rank, with parameters on the meta device: without memory. A rank gives memory to
            those of its own chunks only (`megasnn.parallel.sharding.materialise`).
        time_steps: T.
        input_shape: of one sample, (C, H, W) for images and (T, C, H, W) for event frames.
        num_classes: size of the logits `[T, N, num_classes]`.
        ties: copies of tensors, in the order of the layers that have them.
        tensors: parameters and buffers, as one rank has them.
        neurons: descriptions of the neurons in the layers.
    """

    layers: tuple[LayerDescription, ...]
    task: Task
    build: Callable[[BuildContext], Sequence[Built]]
    time_steps: int
    input_shape: tuple[int, ...]
    num_classes: int
    ties: tuple[Tie, ...]
    tensors: tuple[ShardedTensor, ...]
    neurons: frozenset[NeuronSpec] = frozenset()

    def named_layers(self, context: BuildContext) -> list[tuple[str, nn.Module]]:
        """All layers for a rank with their names, without memory."""
        return [(each.name, each.module) for each in self.build(context)]

    @cached_property
    def inputs(self) -> tuple[tuple[int, ...], ...]:
        """Numbers, for each layer, of the layers whose outputs it takes."""
        return sources([(layer.name, layer.takes) for layer in self.layers], [*self.task.inputs])

    @property
    def is_chain(self) -> bool:
        """Tells whether each layer takes one tensor, the output of the layer before it, and nothing else."""
        return not any(layer.takes or None not in layer.entries for layer in self.layers)

    def needed_from(self, stop: int) -> list[int]:
        """The layers before layer `stop` whose outputs are still needed from there on, in their order.

        Behind the last layer that is its own output, which the loss takes.
        """
        needed = {source for taken in self.inputs[stop:] for source in taken if source < stop}
        return sorted(needed) or [len(self.layers) - 1]

    def carried(self, stop: int) -> list[Carried]:
        """The tensors that cross a boundary before layer `stop`, each once, in a fixed order."""
        found = []
        for number in self.needed_from(stop):
            if number < 0:
                name = [*self.task.inputs][-1 - number]
                found.append(Carried(number, None, Content.DENSE, f"the model's input {name}"))
                continue
            layer = self.layers[number]
            for key, entry in layer.entries.items():
                place = "the output" if key is None else f"entry {key!r} of the output"
                found.append(Carried(number, key, entry.content, f"{place} of {layer.name}"))
        return found


def sources(layers: Sequence[tuple[str, Sequence[str]]], inputs: Sequence[str]) -> tuple[tuple[int, ...], ...]:
    """Numbers, for each layer, of those it takes; -1, -2 and so on are the model's inputs.

    Args:
        layers: (name, names that it takes); without names, a layer takes the one before it, and the first layer takes
            the first input.
    Raises:
        ValueError: a name that is no earlier layer's and no input's, or is both.
    """
    numbers = {name: -1 - number for number, name in enumerate(inputs)}
    found: list[tuple[int, ...]] = []
    for number, (name, takes) in enumerate(layers):
        for taken in takes:
            if taken not in numbers:
                later = any(taken == other for other, _ in layers)
                why = "which is no earlier layer" if later else "and no layer has that name"
                raise ValueError(f"{name} takes {taken!r}, {why}; inputs and earlier layers: {', '.join(numbers)}")
        if name in inputs:
            raise ValueError(f"the layer {name!r} has the name of an input; give it another one")
        found.append(tuple(numbers[taken] for taken in takes) or (number - 1,))
        numbers[name] = number
    return tuple(found)
