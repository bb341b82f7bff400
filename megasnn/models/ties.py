"""Ties between layers: a module that is yielded again, a parameter that two modules hold.

Each layer gets modules and tensors of its own, so that it can live on any stage and keeps its own state and gradient.
Those of a later layer are copies, tied to those of the first layer that has them: the owner.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor, nn

from megasnn.layers import DropPath, ParallelDropout
from megasnn.layers.init import own_tensors
from megasnn.layers.refusals import SHARDED
from megasnn.layers.shape_inference import calls_of
from megasnn.models.description import Built
from megasnn.models.layer import Layer
from megasnn.parallel.sharding import tie


class _Place(NamedTuple):
    """A tensor, by the number of its layer, the path of its module in it, and its name there."""

    layer: int
    path: str
    name: str


Ties = dict[_Place, _Place]
"""Copy -> owner."""


def separate(layers: Sequence[Layer]) -> tuple[list[Layer], Ties]:
    """The layers with modules and tensors of their own, without memory, and which of them are copies of which."""
    owners: dict[int, _Place] = {}
    seen: set[nn.Module] = set()
    separated: list[Layer] = []
    ties: Ties = {}
    for number, each in enumerate(layers):
        mine = {module for module in each.module.modules() if has_state(module) or module is each.module}
        is_new = seen.isdisjoint(mine) and not each.is_sharded  # a network given to shard stays as it is
        made = each if is_new else replace(each, module=_copied(each))
        for path, module in each.module.named_modules():
            for name, tensor in [*own_tensors(module)]:
                place = _Place(number, path, name)
                owner = owners.setdefault(id(tensor), place)
                if owner != place:
                    ties[place] = owner
                    renewed = _renew(made.module.get_submodule(path), name)
                    owners[id(renewed)] = owner  # the module may be another layer, too
        seen |= mine
        separated.append(made)
    return separated, ties


def has_state(module: nn.Module) -> bool:
    """Tells whether a module is of one layer alone. Functions as modules, like SpikingJelly's surrogates, may be
    shared; sharded layers and tensors may not."""
    return isinstance(module, SHARDED) or next(own_tensors(module), None) is not None


def tie_all(layers: Sequence[Built], ties: Ties) -> None:
    """Says of every copy whose it is, behind the dry run. Raises ValueError for one that is cut otherwise than its
    owner, or of a norm that is called more often than the other."""
    for place, owner in ties.items():
        module, of_owner = (layers[at.layer].module.get_submodule(at.path) for at in (place, owner))
        mine, owners = (".".join(filter(None, (layers[at.layer].name, *at[1:]))) for at in (place, owner))
        try:
            if place.name == "running_mean" and calls_of(module) != calls_of(of_owner):  # statistics are paired
                calls = f"{calls_of(module)} and {calls_of(of_owner)}"
                raise ValueError(f"a forward calls them {calls} times: let both layers call the norm as often")
            tie(module, place.name, owners, of_owner, owner.name)
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
