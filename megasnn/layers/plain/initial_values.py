"""Initial values of plain modules.

They come from the numbers that a constructor sets, from `reset_parameters` and from a function of the user's. The last
of these wins. Modules are made on the meta device; values are found on a copy.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from megasnn.layers.init import ModuleInitialiser, own_tensors, tensors_of
from megasnn.parallel.sharding import Initialiser


class _Numbers(TorchFunctionMode):
    """Tensors that are made of one number have memory, whatever the device that is entered."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        options = dict(kwargs or {})
        makes = function in (torch.tensor, torch.as_tensor) and args and isinstance(args[0], (int, float))
        if makes and options.get("device") is None:
            options["device"] = "cpu"
        return function(*args, **options)


def without_values(module: nn.Module) -> nn.Module:
    """A copy on the meta device, in which single numbers alone have values, and neurons no state."""
    copies: dict[int, Any] = {}
    for each in module.modules():
        for _, tensor in own_tensors(each):
            value = tensor.detach().clone() if tensor.ndim == 0 else tensor.detach().to("meta")
            copies.setdefault(id(tensor), _like(tensor, value))
        for state in vars(each).get("_memories", {}).values():  # of SpikingJelly's neurons
            if isinstance(state, Tensor):
                copies[id(state)] = state.detach()
    made = copy.deepcopy(module, copies)
    for each in made.modules():
        reset = getattr(each, "reset", None)
        if callable(reset):
            reset()
    return made


def _like(tensor: Tensor, value: Tensor) -> Tensor:
    """A parameter or buffer as another one is, with another value."""
    new: Tensor = nn.Parameter(value, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else value
    vars(new).update(vars(tensor))
    return new


@contextmanager
def without_memory() -> Iterator[None]:
    """Makes modules on the meta device; of their tensors, single numbers alone have values."""
    with torch.device("meta"), _Numbers():
        yield


def initializer_from_module(module: nn.Module, initialise: ModuleInitialiser | None, name: str) -> Initialiser:
    """Fills a global tensor with the values that a plain module, and then the user's `initialise`, gives its own tensor
    of this name."""
    numbers = {each: tensor.detach().clone() for each, tensor in own_tensors(module) if not tensor.is_meta}

    def fill(tensor: Tensor, generator: torch.Generator) -> None:
        # Without a look at the values: those of a gathered weight have no memory.
        fresh = copy.deepcopy(module, {id(each): _like(each, _without_values(each)) for each in tensors_of(module)})
        for own, value in numbers.items():
            getattr(fresh, own).data.copy_(value)
        before, version = getattr(fresh, name), getattr(fresh, name)._version
        reset = getattr(fresh, "reset_parameters", None) or getattr(fresh, "_reset_parameters", None)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(generator.initial_seed())
            if callable(reset):
                reset()
            _set_what_constructors_set(fresh)
            if initialise is not None:
                for each in reversed(list(fresh.modules())):  # as Module.apply: the parts first
                    initialise(each)
        values = getattr(fresh, name)
        is_set = name in numbers or values is not before or values._version > version
        if values.is_floating_point() and name not in numbers:  # tensor.data changes without a version
            is_set = not values.isnan().any()
        if not is_set:
            raise ValueError(
                f"nothing initialises {name!r} of {type(module).__name__}: values that its constructor sets are not "
                "kept; give the module a method reset_parameters that sets them, or the layer a function initialise=..."
            )
        tensor.copy_(values)

    return fill


def _without_values(tensor: Tensor) -> Tensor:
    """Memory without values, in float32 as materialise draws: torch draws other numbers in float64."""
    is_float = tensor.is_floating_point()
    dtype = torch.float32 if is_float else tensor.dtype
    return torch.full(tensor.shape, math.nan if is_float else 0, dtype=dtype, device="cpu")


def _set_what_constructors_set(module: Any) -> None:
    """Sets what the constructor of SpikingJelly's tdBN sets beside numbers."""
    kind = type(module)
    if kind.__module__.startswith("spikingjelly.") and "ThresholdDependentBatchNorm" in kind.__name__:
        nn.init.constant_(module.weight, module.alpha * module.v_th)
