"""Layer of a model with its name, as a model's `layers` yields it."""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import nn

from megasnn.layers.init import ModuleInitialiser


@dataclass(frozen=True)
class Layer:
    """
    Attributes:
        name: global name, the prefix of its parameters' names; unlike that of any other layer.
        module: takes the outputs of `takes`, and returns a tensor, or a tuple or dict of tensors.
        layer_group: the coarser part that it belongs to ("patch_embed", "blocks.0"), for explicit layouts (not the
            segment of a schedule, which is a layer or a chunk: megasnn/schedule/actions.py).
        initialise: of a plain module: sets initial values of each module in it, after their `reset_parameters`.
        takes: names of the earlier layers whose outputs are its inputs; empty: the layer before it.
        is_sharded: the module was given to `megasnn.shard`, and the layer is made of a copy.
    """

    name: str
    module: nn.Module
    layer_group: str
    initialise: ModuleInitialiser | None = None
    takes: tuple[str, ...] = ()
    is_sharded: bool = False


class LayerSource(ABC):
    """Object that a layer is made of when a model is built, such as `megasnn.shard(net)`."""

    initialise: ModuleInitialiser | None

    @abstractmethod
    def give(self) -> nn.Module:
        """The module of the layer. Raises ValueError for one that no layer can be made of."""


class FunctionLayer(nn.Module):
    """A function of the inputs as a module. It is whole on every tensor parallel rank, and learns nothing."""

    mixes_rows = True  # of a function nobody knows: see `megasnn.layers.plain.refusals`

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *inputs: Any) -> Any:
        return self.function(*inputs)


def require_module(what: str, module: object) -> nn.Module:
    """The module that is given to `what`. Raises ValueError for anything else, such as a class."""
    if not isinstance(module, nn.Module):
        raise ValueError(f"{what} is given {module!r}, where it takes a torch.nn.Module")
    return module


def require_initialiser(what: str, initialise: object) -> None:
    """Raises ValueError for something else than a function of one module, or None."""
    if initialise is None:
        return
    fits = callable(initialise)
    if callable(initialise):
        with suppress(ValueError):  # some builtins do not say what they take
            try:
                inspect.signature(initialise).bind(nn.Identity())
            except TypeError:
                fits = False
    if not fits:
        raise ValueError(
            f"{what}: initialise={initialise!r} is called with each module alone: give a function of one module"
        )


def layer(
    name: str,
    module: nn.Module | LayerSource | Callable[..., Any],
    *,
    layer_group: str | None = None,
    initialise: ModuleInitialiser | None = None,
    takes: Sequence[str] | None = None,
) -> Layer:
    """A layer of a model; see `Layer`. Without `layer_group` it is a group of its own; one name in `takes` may be
    alone.

    A function is a layer as well, but not where ranks share out rows: `layer("add", torch.add, takes=("a", "b"))`.

    Raises ValueError for an empty `takes`, `initialise` beside that of `megasnn.shard` or not a function of one module,
    and for what is neither a module nor a function of its inputs alone.
    """
    require_initialiser(name, initialise)
    candidate: Any = module
    is_sharded = isinstance(candidate, LayerSource)
    if inspect.isroutine(candidate) or isinstance(candidate, partial):
        candidate = FunctionLayer(candidate)
    elif is_sharded:
        if initialise is not None:
            raise ValueError(f"{name}: give initialise=... to megasnn.shard, which describes the initial values")
        initialise = candidate.initialise
        try:
            candidate = candidate.give()
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from error
    if takes is not None and not takes:
        raise ValueError(f"{name}: takes={takes!r} names no layer; leave it out to take the layer before")
    names = (takes,) if isinstance(takes, str) else tuple(takes or ())
    return Layer(name, require_module(f"layer {name!r}", candidate), layer_group or name, initialise, names, is_sharded)
