"""What a model's `layers` yields: one layer with its name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import nn

from megasnn.comm.codec import Content
from megasnn.layers.own_values import ModuleInitialiser

if TYPE_CHECKING:
    from megasnn.models.shard import Sharded

Holds = Content | tuple[Content | None, ...] | Mapping[str, Content | None] | None


@dataclass(frozen=True)
class Layer:
    """
    Attributes:
        name: global name, the prefix of its parameters' names; unlike that of any other layer.
        module: takes the outputs of `takes`, and returns a tensor, or a tuple or dict of tensors.
        unit: the coarser part that it belongs to ("patch_embed", "blocks.0"), for explicit layouts.
        holds: what the output holds, where that does not follow from the layer: for a bundle a tuple or dict like it;
            None: what the dry run shows.
        initialise: of a plain module: sets initial values of each module in it, after their `reset_parameters`.
        takes: names of the earlier layers whose outputs are its inputs; None: the layer before it.
    """

    name: str
    module: nn.Module
    unit: str
    holds: Holds = None
    initialise: ModuleInitialiser | None = None
    takes: tuple[str, ...] | None = None


def require_module(what: str, module: object) -> nn.Module:
    """The module that is given to `what`. Raises ValueError for anything else."""
    if isinstance(module, type):
        raise ValueError(f"{what} is given the class {module.__name__}: give it a module, {module.__name__}(...)")
    if not isinstance(module, nn.Module):
        raise ValueError(f"{what} is given {module!r}, where it takes a torch.nn.Module")
    return module


def layer(
    name: str,
    module: nn.Module | Sharded,
    *,
    unit: str | None = None,
    holds: Holds = None,
    initialise: ModuleInitialiser | None = None,
    takes: Sequence[str] | None = None,
) -> Layer:
    """A layer of a model; see `Layer`. Without `unit` it is a unit of its own; one name in `takes` may be alone.

    Raises ValueError for `initialise` where `megasnn.shard` is to be given it, as that, and for what is no module.
    """
    if not isinstance(module, nn.Module) and hasattr(type(module), "as_layer"):
        if initialise is not None:
            raise ValueError(f"{name}: give initialise=... to megasnn.shard, which describes the initial values")
        try:
            module, initialise = module.as_layer()
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from error
    made = require_module(f"layer {name!r}", module)
    names = (takes,) if isinstance(takes, str) else takes
    return Layer(name, made, unit or name, holds, initialise, None if names is None else tuple(names))
