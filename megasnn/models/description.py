"""Description of a model before it exists: its layers' names and what they give, and how they are built for a rank."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from torch import nn

from megasnn.bundle import Bundle, Key
from megasnn.kernels.neuron_spec import NeuronSpec
from megasnn.kernels.spike_codec import Content
from megasnn.layers.context import BuildContext
from megasnn.parallel.sharding import ShardedTensor

if TYPE_CHECKING:
    from megasnn.models.task import Task

DRY_SAMPLES = 2  # of the dry run: a norm in training needs more than one value


class Built(NamedTuple):
    """Layer that is built for a rank, on the meta device.

    Attributes:
        name, unit, inputs: as of `LayerDescription`.
        output: of a dry run with `DRY_SAMPLES` samples.
        operations: multiply-adds in a sample's forward, as far as they were counted.
    """

    name: str
    unit: str
    inputs: tuple[int, ...]
    module: nn.Module
    output: Bundle
    operations: int = 0


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
        name, unit: as of `megasnn.models.layer.Layer`.
        entries: tensors of its output; one without a key is no bundle.
        inputs: numbers of the layers whose outputs it takes; -1, -2 and so on are the model's inputs.
        parameters: number of elements of its parameters.
        operations: multiply-adds in a sample's forward: of convolutions, linear layers and products of matrices, each
            as often as it is computed here (of an image that all time steps see, once).
    """

    name: str
    unit: str
    entries: Mapping[Key, EntryDescription]
    inputs: tuple[int, ...]
    parameters: int
    operations: int


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
        ties: copies of tensors, in the order of the layers that have them.
        tensors: parameters and buffers, as one rank has them.
        neurons: descriptions of the neurons in the layers.
    """

    layers: tuple[LayerDescription, ...]
    task: Task
    build: Callable[[BuildContext], Sequence[Built]]
    ties: tuple[Tie, ...]
    tensors: tuple[ShardedTensor, ...]
    neurons: frozenset[NeuronSpec] = frozenset()

    def named_layers(self, context: BuildContext) -> list[tuple[str, nn.Module]]:
        """All layers for a rank with their names, without memory."""
        return [(each.name, each.module) for each in self.build(context)]

    @property
    def is_chain(self) -> bool:
        """Tells whether each layer takes one tensor, the output of the layer before it, and nothing else."""
        follows = [each.inputs == (number - 1,) for number, each in enumerate(self.layers)]
        return all(follows) and all(None in each.entries for each in self.layers)

    def needed_from(self, stop: int) -> list[int]:
        """The layers before layer `stop` whose outputs are still needed from there on, in their order.

        Behind the last layer that is its own output, which the loss takes.
        """
        needed = {source for each in self.layers[stop:] for source in each.inputs if source < stop}
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
