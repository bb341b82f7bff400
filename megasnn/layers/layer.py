"""A named layer, as a model's `layers` method yields it."""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import nn

from megasnn.layers.init import ModuleInitialiser


@dataclass(frozen=True)
class Layer:
    """A module with its name and inputs.

    Attributes:
        name: unique global name, the prefix of its parameters' names.
        module: maps the inputs to a tensor, or a tuple or dict of tensors.
        layer_group: layers with this name stay together in explicit layouts ("patch_embed", "blocks.0").
        takes: input layers' names; empty for the layer before.
        is_sharded: the module comes from `megasnn.shard`, which copies it.
    """

    name: str
    module: nn.Module
    layer_group: str
    initialise: ModuleInitialiser | None = None
    takes: tuple[str, ...] = ()
    is_sharded: bool = False


class LayerTraits:
    """Attributes by which a layer's modules say how ranks may divide their inputs.

    Any module may have them, in its class or by itself; it needs no base class. Without one, the default here holds.
    """

    mixes_rows: bool | None = None
    """Whether an output pixel depends on other rows of the input. --context-parallel-cut rows refuses such a module.

    False also for a module that exchanges rows itself, or follows `WholeImages`. None: MegaSNN's modules, neurons and
    torch's pointwise modules do not mix rows, and all others may.
    """
    mixes_tokens: bool | None = None
    """Whether an output token depends on other tokens. --context-parallel-cut tokens refuses such a module.

    False also for a module that exchanges tokens itself. None: True if `mixes_rows` is, because tokens are the rows of
    a signal. Otherwise neurons and torch's pointwise modules do not mix tokens, and all others may.
    """
    cut_inputs: tuple[bool, ...] | None = None
    """For each input, True if a tensor-parallel rank takes its own channels, False if it takes the whole input.

    The layer is cut for these inputs, and whole for others. None: its code decides (`plain.by_channel.may_be_cut`).
    """
    multiplies_by_weight: bool = False
    """Whether the only use of `weight` is a product in the compute type (`CastWeights`).

    Divided weights (`megasnn.parallel.fsdp`) then travel in that type. It is not inherited, because a derived class may
    use the weight in another way.
    """


class LayerSource(ABC):
    """Source of a layer's module, such as `megasnn.shard(net)`."""

    initialise: ModuleInitialiser | None

    @abstractmethod
    def module(self) -> nn.Module:
        """The layer's module. Raises ValueError for an unsupported one."""


class FunctionLayer(nn.Module):
    """A function as a module, whole on every tensor-parallel rank."""

    mixes_rows = True  # an unknown function may mix them

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *inputs: Any) -> Any:
        return self.function(*inputs)


def require_module(receiver: str, module: object) -> nn.Module:
    """The module. Raises ValueError for anything else, such as a class."""
    if not isinstance(module, nn.Module):
        raise ValueError(f"{receiver} takes a torch.nn.Module, got {module!r}")
    return module


def module_initialiser(receiver: str, initialise: Any) -> ModuleInitialiser | None:
    """A user's function of a module, or of a module and its path, as a function of both.

    Raises ValueError for anything else but None.
    """
    if initialise is None:
        return None
    refusal = f"{receiver}: initialise={initialise!r} must be a function of a module, or of a module and its path"
    if not callable(initialise):
        raise ValueError(refusal)
    try:
        signature = inspect.signature(initialise)
    except ValueError:
        # Python knows no signature of some builtins.
        return lambda module, path: initialise(module)
    # A second argument that has a default is an option of the function, and no path.
    if _accepts(signature, "a module"):
        return lambda module, path: initialise(module)
    if _accepts(signature, "a module", "its path"):
        return initialise
    raise ValueError(refusal)


def _accepts(signature: inspect.Signature, *arguments: str) -> bool:
    try:
        signature.bind(*arguments)
    except TypeError:
        return False
    return True


def layer(
    name: str,
    module: nn.Module | LayerSource | Callable[..., Any],
    *,
    layer_group: str | None = None,
    initialise: Callable[..., object] | None = None,
    takes: Sequence[str] | None = None,
) -> Layer:
    """Makes a layer; see `Layer`.

    Args:
        module: a module, `megasnn.shard(...)`, or a function: `layer("add", torch.add, takes=("a", "b"))`. Functions
            need --context-parallel-cut samples.
        initialise: a function of a module, or of a module and its path in the model. It is called once for each tensor,
            with the module that has it, after the module's own initialisation. It sets that module's tensors.
        layer_group: default: the layer's name.
        takes: one name or several.
    Raises:
        ValueError: empty `takes`; `initialise` beside `megasnn.shard`, or no function of a module; another type.
    """
    initialiser = module_initialiser(name, initialise)
    candidate: Any = module
    is_sharded = isinstance(candidate, LayerSource)
    if inspect.isroutine(candidate) or isinstance(candidate, partial):
        candidate = FunctionLayer(candidate)
    elif is_sharded:
        if initialise is not None:
            raise ValueError(f"{name}: give initialise=... to megasnn.shard, not to layer")
        initialiser = candidate.initialise
        try:
            candidate = candidate.module()
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from error
    if takes is not None and not takes:
        raise ValueError(f"{name}: takes={takes!r} names no layer; leave it out to take the layer before")
    names = (takes,) if isinstance(takes, str) else tuple(takes or ())
    made = require_module(f"layer {name!r}", candidate)
    return Layer(name, made, layer_group or name, initialiser, names, is_sharded)
