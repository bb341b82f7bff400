"""Layer of a model with its name, as a model's `layers` yields it."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from megasnn.layers.init import ModuleInitialiser
from megasnn.layers.plain import ELEMENTWISE

if TYPE_CHECKING:
    from megasnn.models.convert_module import Sharded


@dataclass(frozen=True)
class Layer:
    """
    Attributes:
        name: global name, the prefix of its parameters' names; unlike that of any other layer.
        module: takes the outputs of `takes`, and returns a tensor, or a tuple or dict of tensors.
        unit: the coarser part that it belongs to ("patch_embed", "blocks.0"), for explicit layouts.
        initialise: of a plain module: sets initial values of each module in it, after their `reset_parameters`.
        takes: names of the earlier layers whose outputs are its inputs; None: the layer before it.
    """

    name: str
    module: nn.Module
    unit: str
    initialise: ModuleInitialiser | None = None
    takes: tuple[str, ...] | None = None


class Computed(nn.Module):
    """A function of the inputs as a module. It is whole on every tensor parallel rank, and learns nothing.

    Raises:
        ValueError: the function holds modules or tensors, whose values nobody would initialise, cut, train or save.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        if held := [each for each in _held(function) if isinstance(each, (nn.Module, Tensor))]:
            raise ValueError(
                f"a function that holds a {type(held[0]).__name__}: make a module of both, and yield it as a layer"
            )
        self.function = function

    @property
    def mixes_rows(self) -> bool:
        """See `megasnn.layers.plain`."""
        return self.function not in ELEMENTWISE

    def forward(self, *inputs: Any) -> Any:
        return self.function(*inputs)

    def extra_repr(self) -> str:
        return getattr(self.function, "__qualname__", repr(self.function))


def _held(function: Callable[..., Any]) -> Iterator[object]:
    """Values that a function computes with beside its arguments."""
    if isinstance(function, partial):
        yield from (*function.args, *function.keywords.values(), *_held(function.func))
    elif inspect.ismethod(function):
        yield from (function.__self__, *_held(function.__func__))
    elif inspect.isfunction(function):
        names = inspect.getclosurevars(function)
        yield from (*names.nonlocals.values(), *names.globals.values(), *(function.__defaults__ or ()))


def require_module(what: str, module: object) -> nn.Module:
    """The module that is given to `what`. Raises ValueError for anything else."""
    if isinstance(module, type):
        raise ValueError(f"{what} is given the class {module.__name__}: give it a module, {module.__name__}(...)")
    if not isinstance(module, nn.Module):
        raise ValueError(f"{what} is given {module!r}, where it takes a torch.nn.Module")
    return module


def layer(
    name: str,
    module: nn.Module | Sharded | Callable[..., Any],
    *,
    unit: str | None = None,
    initialise: ModuleInitialiser | None = None,
    takes: Sequence[str] | None = None,
) -> Layer:
    """A layer of a model; see `Layer`. Without `unit` it is a unit of its own; one name in `takes` may be alone.

    A function is a layer as well: `layer("add", torch.add, takes=("a", "b"))`.

    Raises ValueError for `initialise` where `megasnn.shard` is to be given it, as that, and for what is neither a
    module nor a function of its inputs alone.
    """
    given: Any = module
    try:
        if inspect.isroutine(given) or isinstance(given, partial):
            given = Computed(given)
        elif not isinstance(given, nn.Module) and hasattr(type(given), "as_layer"):
            if initialise is not None:
                raise ValueError("give initialise=... to megasnn.shard, which describes the initial values")
            given, initialise = given.as_layer(name)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from error
    made = require_module(f"layer {name!r}", given)
    names = (takes,) if isinstance(takes, str) else takes
    return Layer(name, made, unit or name, initialise, None if names is None else tuple(names))
