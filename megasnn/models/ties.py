"""Ties between layers: a module that is yielded again, a parameter that two modules hold.

Each layer gets modules and tensors of its own, so that it can live on any stage and keeps its own state and gradient.
Those of a later layer are copies, tied to those of the first layer that has them: the owner.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import chain
from typing import NamedTuple

import torch
from torch import Tensor, nn

from megasnn.layers import DropPath, ParallelBatchNorm, ParallelDropout
from megasnn.layers.refusals import SHARDED
from megasnn.layers.shape_inference import calls_of
from megasnn.models.layer import Layer
from megasnn.parallel.sharding import owner_name, tie


class _Place(NamedTuple):
    layer: int
    path: str
    name: str


Ties = dict[_Place, _Place]
"""Copy -> owner: tensors by the layer's number, the path of the module in it, and its name there."""


def separate(layers: Sequence[Layer]) -> tuple[list[Layer], Ties]:
    """The layers with modules and tensors of their own, without memory, and which of them are copies of which."""
    owners: dict[int, _Place] = {}
    modules: set[int] = set()
    separated: list[Layer] = []
    ties: Ties = {}
    for number, each in enumerate(layers):
        copies: Ties = {}
        for place, tensor in _tensors(number, each.module):
            owner = owners.setdefault(id(tensor), place)
            if owner != place:
                copies[place] = owner
        mine = {id(module) for module in each.module.modules() if _is_one_layers(module) or module is each.module}
        made = each if modules.isdisjoint(mine) else replace(each, module=_copied(each))
        modules |= mine
        for place in copies:
            _renew(made.module.get_submodule(place.path), place.name)
        separated.append(made)
        ties |= copies
    return separated, ties


def tie_all(layers: Sequence[Layer], ties: Ties) -> None:
    """Says of every copy whose it is. Raises ValueError for one that is cut otherwise than its owner."""
    for place, owner in ties.items():
        module, of_owner = (layers[at.layer].module.get_submodule(at.path) for at in (place, owner))
        try:
            tie(module, place.name, _global_name(layers, owner), of_owner, owner.name)
        except ValueError as error:
            raise ValueError(
                f"{_global_name(layers, place)} is tied to {_global_name(layers, owner)}: {error}"
            ) from None


def refuse_other_calls(named_layers: Iterable[tuple[str, nn.Module]]) -> None:
    """Raises ValueError, behind the dry run, for a norm that one layer calls more often than another that has it too,
    because their statistics are paired."""
    calls: dict[str, int] = {}
    for layer, module in named_layers:
        for path, norm in module.named_modules(prefix=layer):
            if isinstance(norm, ParallelBatchNorm):
                owner = owner_name(norm, "running_mean", path)
                if calls.setdefault(owner, calls_of(norm)) != calls_of(norm):
                    raise ValueError(
                        f"{path} is called {calls_of(norm)} times in a forward, and {owner.rpartition('.')[0]}, of "
                        f"which it is a copy, {calls[owner]} times: let both layers call the norm as often"
                    )


def _global_name(layers: Sequence[Layer], place: _Place) -> str:
    return ".".join(filter(None, (layers[place.layer].name, place.path, place.name)))


def _tensors(number: int, layer: nn.Module) -> Iterator[tuple[_Place, Tensor]]:
    for path, module in layer.named_modules():
        parameters = module.named_parameters(recurse=False, remove_duplicate=False)
        for name, tensor in chain(parameters, module.named_buffers(recurse=False, remove_duplicate=False)):
            yield _Place(number, path, name), tensor


def _is_one_layers(module: nn.Module) -> bool:
    """Functions as modules, like SpikingJelly's surrogates, may be shared; sharded layers and tensors may not."""
    tensors = chain(module.parameters(recurse=False), module.buffers(recurse=False))
    return isinstance(module, SHARDED) or any(True for _ in tensors)


def _copied(each: Layer) -> nn.Module:
    made = copy.deepcopy(each.module)
    for module in made.modules():
        if isinstance(module, (ParallelDropout, DropPath)):
            module.name = f"{module.name}, {each.name}"  # the same layer draws other numbers the next time
    return made


def _renew(module: nn.Module, name: str) -> None:
    """A tensor of its own in place of one that it shares."""
    old = getattr(module, name)
    made = torch.empty_like(old)
    setattr(module, name, nn.Parameter(made, old.requires_grad) if isinstance(old, nn.Parameter) else made)
