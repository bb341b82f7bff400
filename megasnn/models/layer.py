"""What a model's `layers` yields: one layer with its name."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from megasnn.comm.codec import Content
from megasnn.layers.whole import ModuleInitialiser


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
    module: nn.Module,
    *,
    unit: str | None = None,
    holds: Content | None = None,
    initialise: ModuleInitialiser | None = None,
) -> Layer:
    """A layer of a model; see `Layer`. Without `unit` it is a unit of its own."""
    return Layer(name, module, unit or name, holds, initialise)
