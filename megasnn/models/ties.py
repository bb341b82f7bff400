"""Ties: modules that a model yields again, and parameters in two modules.

Each layer gets its own modules and tensors: it can live on any stage, and keeps its state and gradient. The first layer
with a tensor owns it; later layers get copies.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor, nn

from megasnn.layers import DropPath, ParallelDropout
from megasnn.layers.facts import facts
from megasnn.layers.init import own_tensors
from megasnn.layers.layer import Layer
from megasnn.layers.plain.refusals import SHARDED
from megasnn.layers.tensors import tie
from megasnn.models.description import Built


class _TensorPath(NamedTuple):
    """`layer`: its number. `path`: the module in the layer. `name`: the tensor in the module."""

    layer: int
    path: str
    name: str

    def module(self, layers: Sequence[Built]) -> nn.Module:
        return layers[self.layer].module.get_submodule(self.path)

    def global_name(self, layers: Sequence[Built]) -> str:
        words = (layers[self.layer].name, self.path, self.name)
        return ".".join(filter(None, words))


TiedTensors = dict[_TensorPath, _TensorPath]
"""Copy -> owner."""


def separate(layers: Sequence[Layer]) -> tuple[list[Layer], TiedTensors]:
    """Gives every layer its own modules and tensors, without memory. Returns layers and ties."""
    owners: dict[int, _TensorPath] = {}
    seen: set[nn.Module] = set()
    separated: list[Layer] = []
    ties: TiedTensors = {}
    for number, each in enumerate(layers):
        mine = {module for module in each.module.modules() if has_state(module) or module is each.module}
        # megasnn.shard leaves the user's network as it is.
        is_new = seen.isdisjoint(mine) and not each.is_sharded
        made = each if is_new else replace(each, module=_copied(each))
        for path, module in each.module.named_modules():
            for name, tensor in [*own_tensors(module)]:
                where = _TensorPath(number, path, name)
                owner = owners.setdefault(id(tensor), where)
                if owner != where:
                    ties[where] = owner
                    renewed = _renew(made.module.get_submodule(path), name)
                    # A later layer may be this module again.
                    owners[id(renewed)] = owner
        seen |= mine
        separated.append(made)
    return separated, ties


def has_state(module: nn.Module) -> bool:
    """Whether a module belongs to one layer only: a sharded layer, or a module with tensors.

    Functions as modules, like SpikingJelly's surrogates, may be shared.
    """
    return isinstance(module, SHARDED) or next(own_tensors(module), None) is not None


def tie_all(layers: Sequence[Built], ties: TiedTensors) -> None:
    """Ties every copy to its owner, after the dry run.

    Raises:
        ValueError: copy and owner are cut differently, or a forward calls two tied norms unequally often.
    """
    for where, owner in ties.items():
        module = where.module(layers)
        owner_module = owner.module(layers)
        owner_name = owner.global_name(layers)
        calls = facts(module).calls
        owner_calls = facts(owner_module).calls
        try:
            # Statistics are exchanged call by call.
            if where.name == "running_mean" and calls != owner_calls:
                raise ValueError(
                    f"a forward calls the tied norms {calls} and {owner_calls} times: make these numbers equal"
                )
            tie(module, where.name, owner_name, owner_module, owner.name)
        except ValueError as error:
            raise ValueError(f"{where.global_name(layers)} is tied to {owner_name}: {error}") from None


def _copied(each: Layer) -> nn.Module:
    made = copy.deepcopy(each.module)
    for old, new in zip(each.module.parameters(), made.parameters(), strict=True):
        # torch copies no attributes of parameters.
        vars(new).update(vars(old))
    for module in made.modules():
        if isinstance(module, (ParallelDropout, DropPath)):
            # Draws are keyed by name, and differ between layers.
            module.name = f"{module.name}, {each.name}"
    return made


def _renew(module: nn.Module, name: str) -> Tensor:
    old = getattr(module, name)
    made = torch.empty_like(old)
    if isinstance(old, nn.Parameter):
        made = nn.Parameter(made, old.requires_grad)
    setattr(module, name, made)
    return made
