"""Description of a model before it exists: its layers' names and outputs, its ties, and its building on a rank.

A tie is a module that is yielded again, or a parameter that two modules hold. Each layer gets modules and tensors of
its own, so that it can live on any stage and keeps its own state and gradient. The tensors of a later layer are
copies, tied to the tensors of the first layer that has them: the owner.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor, nn

from megasnn.common.bundle import Bundle, EntryKey
from megasnn.kernels.neuron_spec import NeuronSpec
from megasnn.kernels.spike_codec import Content
from megasnn.layers import DropPath, ParallelDropout
from megasnn.layers.context import BuildContext
from megasnn.layers.facts import facts
from megasnn.layers.init import own_tensors
from megasnn.layers.layer import Layer
from megasnn.layers.plain.refusals import SHARDED
from megasnn.layers.tensors import tie
from megasnn.parallel.sharding import ShardedTensor

if TYPE_CHECKING:
    from megasnn.models.task import Task


DRY_SAMPLES = 2  # of the dry run: a norm in training needs more than one value


class Built(NamedTuple):
    """Layer that is built for a rank, on the meta device.

    Attributes:
        name, layer_group, inputs: as of `LayerDescription`.
        output: of a dry run with `DRY_SAMPLES` samples.
        operations: multiply-adds in a sample's forward, as far as they were counted.
    """

    name: str
    layer_group: str
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
        name, layer_group: as of `megasnn.layers.layer.Layer`.
        entries: tensors of its output; one without a key is no bundle.
        inputs: numbers of the layers whose outputs it takes; -1, -2 and so on are the model's inputs.
        parameters: number of elements of its parameters.
        operations: multiply-adds in a sample's forward: of convolutions, linear layers and products of matrices, each
            as often as it is computed here (of an image that all time steps see, once).
    """

    name: str
    layer_group: str
    entries: Mapping[EntryKey, EntryDescription]
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
    key: EntryKey
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


class _TensorPath(NamedTuple):
    """A tensor, by the number of its layer, the path of its module in it, and its name there."""

    layer: int
    path: str
    name: str


TiedTensors = dict[_TensorPath, _TensorPath]
"""Copy -> owner."""


def separate(layers: Sequence[Layer]) -> tuple[list[Layer], TiedTensors]:
    """The layers with modules and tensors of their own, without memory, and which of them are copies of which."""
    owners: dict[int, _TensorPath] = {}
    seen: set[nn.Module] = set()
    separated: list[Layer] = []
    ties: TiedTensors = {}
    for number, each in enumerate(layers):
        mine = {module for module in each.module.modules() if has_state(module) or module is each.module}
        is_new = seen.isdisjoint(mine) and not each.is_sharded  # a network given to shard stays as it is
        made = each if is_new else replace(each, module=_copied(each))
        for path, module in each.module.named_modules():
            for name, tensor in [*own_tensors(module)]:
                where = _TensorPath(number, path, name)
                owner = owners.setdefault(id(tensor), where)
                if owner != where:
                    ties[where] = owner
                    renewed = _renew(made.module.get_submodule(path), name)
                    owners[id(renewed)] = owner  # the module may be another layer, too
        seen |= mine
        separated.append(made)
    return separated, ties


def has_state(module: nn.Module) -> bool:
    """Tells whether a module is of one layer alone. Functions as modules, like SpikingJelly's surrogates, may be
    shared; sharded layers and tensors may not."""
    return isinstance(module, SHARDED) or next(own_tensors(module), None) is not None


def tie_all(layers: Sequence[Built], ties: TiedTensors) -> None:
    """Says of every copy whose it is, behind the dry run. Raises ValueError for one that is cut otherwise than its
    owner, or of a norm that is called more often than the other."""
    for where, owner in ties.items():
        module, of_owner = (layers[at.layer].module.get_submodule(at.path) for at in (where, owner))
        mine, owners = (".".join(filter(None, (layers[at.layer].name, *at[1:]))) for at in (where, owner))
        try:
            if where.name == "running_mean" and facts(module).calls != facts(of_owner).calls:  # statistics are paired
                calls = f"{facts(module).calls} and {facts(of_owner).calls}"
                raise ValueError(f"a forward calls them {calls} times: let both layers call the norm as often")
            tie(module, where.name, owners, of_owner, owner.name)
        except ValueError as error:
            raise ValueError(f"{mine} is tied to {owners}: {error}") from None


def _copied(each: Layer) -> nn.Module:
    made = copy.deepcopy(each.module)
    for old, new in zip(each.module.parameters(), made.parameters(), strict=True):
        vars(new).update(vars(old))  # torch copies no attributes of parameters
    for module in made.modules():
        if isinstance(module, (ParallelDropout, DropPath)):
            module.name = f"{module.name}, {each.name}"  # the same layer draws other numbers the next time
    return made


def _renew(module: nn.Module, name: str) -> Tensor:
    """Gives a module a tensor of its own in place of one that it shares, and returns it."""
    old = getattr(module, name)
    made = torch.empty_like(old)
    made = nn.Parameter(made, old.requires_grad) if isinstance(old, nn.Parameter) else made
    setattr(module, name, made)
    return made
