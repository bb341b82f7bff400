"""What a model's `layers` yields: one layer with its name."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import nn

from megasnn.comm.codec import Content
from megasnn.layers.own_values import ModuleInitialiser

if TYPE_CHECKING:
    from megasnn.models.shard import Sharded


@dataclass(frozen=True)
class Layer:
    """
    Attributes:
        name: global name, the prefix of its parameters' names; unlike that of any other layer.
        module: takes and returns one tensor.
        unit: the coarser part that it belongs to ("patch_embed", "blocks.0"), for explicit layouts.
        initialise: of a plain module: sets initial values of each module in it, after their `reset_parameters`.
        holds: what the output holds, where that does not follow from the layer; None: what the dry run shows.
    """

    name: str
    module: nn.Module
    unit: str
    holds: Content | None = None
    initialise: ModuleInitialiser | None = None


def layer(
    name: str,
    module: nn.Module | Sharded,
    *,
    unit: str | None = None,
    holds: Content | None = None,
    initialise: ModuleInitialiser | None = None,
) -> Layer:
    """A layer of a model; see `Layer`. Without `unit` it is a unit of its own.

    Raises ValueError for `initialise` where the module does not ask for it, and as `megasnn.shard`.
    """
    if not isinstance(module, nn.Module):
        if initialise is not None:
            raise ValueError(f"{name}: give initialise=... to megasnn.shard, which describes the initial values")
        module, initialise = module.as_layer()
    return Layer(name, module, unit or name, holds, initialise)
