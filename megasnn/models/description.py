"""A model before it has memory: layers with outputs, task, ties, and how to build it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from torch import nn

from megasnn.common.bundle import Bundle, EntryKey
from megasnn.kernels.neuron_spec import NeuronSpec
from megasnn.kernels.spike_codec import Content
from megasnn.layers.context import BuildContext
from megasnn.parallel.sharding import ShardedTensor

if TYPE_CHECKING:
    from megasnn.models.task import Task

# In a dry run: a norm in training needs more than one value.
DRY_SAMPLES = 2


class Built(NamedTuple):
    """Layer built for a rank, on the meta device.

    Attributes:
        name, layer_group, inputs: see `LayerDescription`.
        operations: multiply-adds per sample, if counted.
    """

    name: str
    layer_group: str
    inputs: tuple[int, ...]
    module: nn.Module
    output: Bundle
    operations: int = 0


@dataclass(frozen=True)
class EntryDescription:
    """An output tensor.

    Attributes:
        content: known values; decides the packing between stages.
        shape: in a single rank's dry run.
    """

    content: Content
    shape: tuple[int, ...]


@dataclass(frozen=True)
class LayerDescription:
    """A layer, the same on every layout.

    Attributes:
        layer_group: see `megasnn.layers.layer.Layer`.
        entries: output tensors; the key None means a single tensor.
        inputs: its sources' numbers; -1, -2 and so on are the model's inputs, and the number behind them the target.
        operations: multiply-adds per sample in convolutions, linear layers and matrix products. An image shown at all
            time steps counts once.
    """

    name: str
    layer_group: str
    entries: Mapping[EntryKey, EntryDescription]
    inputs: tuple[int, ...]
    parameters: int
    operations: int


@dataclass(frozen=True)
class Tie:
    """A tensor with a copy in a second layer.

    Attributes:
        owner: the layer that counts, steps and saves it.
    """

    name: str
    owner: str
    copy: str


@dataclass(frozen=True)
class Carried:
    """A tensor that crosses a boundary between stages.

    Attributes:
        layer: number of its layer; -1, -2 and so on are the model's inputs.
        key: entry of the layer's output.
    """

    layer: int
    key: EntryKey
    content: Content
    name: str


@dataclass(frozen=True)
class ModelDescription:
    """A model, the same on every layout.

    Attributes:
        layers: from input to logits.
        build: makes all layers for a rank on the meta device; `materialise` gives memory to the rank's own chunks.
        kernel_neurons: kinds that MegaSNN's kernels compute.
        plain_neurons: classes that compute in plain PyTorch.
        calibrates: neurons take their amplitudes from the first batch.
    """

    layers: tuple[LayerDescription, ...]
    task: Task
    build: Callable[[BuildContext], Sequence[Built]]
    ties: tuple[Tie, ...]
    tensors: tuple[ShardedTensor, ...]
    neurons: frozenset[NeuronSpec] = frozenset()
    kernel_neurons: frozenset[str] = frozenset()
    plain_neurons: frozenset[str] = frozenset()
    calibrates: bool = False

    def named_layers(self, context: BuildContext) -> list[tuple[str, nn.Module]]:
        """All layers with names, built for a rank without memory."""
        return [(each.name, each.module) for each in self.build(context)]

    @property
    def layer_names(self) -> list[str]:
        """In model order."""
        return [layer.name for layer in self.layers]

    @property
    def is_chain(self) -> bool:
        """Whether every layer takes exactly one tensor, from the layer before it."""
        for number, each in enumerate(self.layers):
            if each.inputs != (number - 1,) or None not in each.entries:
                return False
        return True

    def summary(self) -> str:
        """A table of layers: output, parameters and multiply-adds a sample.

        An output stands as `[T, C, ...]` for one sample; an image that all time steps share has T = 1. A tied parameter
        counts once.
        """
        rows = [("layer", "output", "parameters", "multiply-adds")]
        for layer in self.layers:
            shapes = []
            for key, entry in layer.entries.items():
                shape = str([entry.shape[0], *entry.shape[2:]])
                shapes.append(shape if key is None else f"{key}: {shape}")
            rows.append((layer.name, ", ".join(shapes), f"{layer.parameters:,}", f"{layer.operations:,}"))
        parameters = sum(layer.parameters for layer in self.layers)
        operations = sum(layer.operations for layer in self.layers)
        rows.append(("total", "", f"{parameters:,}", f"{operations:,}"))
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = []
        for name, output, *counts in rows:
            texts = [name.ljust(widths[0]), output.ljust(widths[1])]
            texts += [count.rjust(width) for count, width in zip(counts, widths[2:], strict=True)]
            lines.append("  ".join(texts))
        return "\n".join(lines)

    def needed_from(self, stop: int) -> list[int]:
        """Layers before `stop` with outputs that later layers or the loss need, ascending."""
        needed: set[int] = set()
        for each in self.layers[stop:]:
            needed.update(source for source in each.inputs if source < stop)
        # The last stage has the targets itself.
        needed.discard(self.task.target_number)
        # After the last layer, the loss needs its output.
        return sorted(needed) or [len(self.layers) - 1]

    def carried(self, stop: int) -> list[Carried]:
        """Tensors that cross the boundary before layer `stop`, each once, in a fixed order."""
        found = []
        # Sender and receiver each make this list: messages carry no names.
        for number in self.needed_from(stop):
            if number < 0:
                name = self.task.input_names[number]
                found.append(Carried(number, None, Content.DENSE, f"the model's input {name}"))
                continue
            layer = self.layers[number]
            for key, entry in layer.entries.items():
                output = "the output" if key is None else f"entry {key!r} of the output"
                found.append(Carried(number, key, entry.content, f"{output} of {layer.name}"))
        return found
