"""Initial values for plain modules, computed on a copy: modules are on the meta device."""

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
    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        options = dict(kwargs or {})
        makes = function in (torch.tensor, torch.as_tensor) and args and isinstance(args[0], (int, float))
        if makes and options.get("device") is None:
            options["device"] = "cpu"
        return function(*args, **options)


@contextmanager
def without_memory() -> Iterator[None]:
    """Modules made inside have no memory. Only single-number tensors have values."""
    with torch.device("meta"), _Numbers():
        yield


def without_values(module: nn.Module) -> nn.Module:
    """A copy on the meta device, with neurons at rest. Only single-number tensors keep values."""
    copies: dict[int, Any] = {}
    for each in module.modules():
        for _, tensor in own_tensors(each):
            value = tensor.detach().clone() if tensor.ndim == 0 else tensor.detach().to("meta")
            copies.setdefault(id(tensor), _like(tensor, value))
        # SpikingJelly's neurons keep their state here. deepcopy refuses tensors inside a graph.
        for state in vars(each).get("_memories", {}).values():
            if isinstance(state, Tensor):
                copies[id(state)] = state.detach()
    made = copy.deepcopy(module, copies)
    for each in made.modules():
        reset = getattr(each, "reset", None)
        if callable(reset):
            reset()
    return made


def _like(tensor: Tensor, value: Tensor) -> Tensor:
    new: Tensor = nn.Parameter(value, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else value
    vars(new).update(vars(tensor))
    return new


def initializer_from_module(module: nn.Module, initialise: ModuleInitialiser | None, name: str) -> Initialiser:
    """Fills a global tensor as a plain module, and then the user's `initialise`, fill its tensor `name`.

    The result raises ValueError if nothing sets values.
    """
    numbers = {each: tensor.detach().clone() for each, tensor in own_tensors(module) if not tensor.is_meta}

    def fill(tensor: Tensor, generator: torch.Generator) -> None:
        # The copy reads no values: a weight that is gathered on demand has no memory now.
        # The last of three wins: numbers set by a constructor, `reset_parameters`, the user's function.
        copies = {id(each): _like(each, _unset_values(each)) for each in tensors_of(module)}
        fresh = copy.deepcopy(module, copies)
        for own, value in numbers.items():
            getattr(fresh, own).data.copy_(value)
        before = getattr(fresh, name)
        version = before._version
        _draw(fresh, initialise, generator)
        values = getattr(fresh, name)
        is_set = name in numbers or values is not before or values._version > version
        if values.is_floating_point() and name not in numbers:
            # A change of tensor.data leaves the version as it is.
            is_set = not values.isnan().any()
        if not is_set:
            raise ValueError(
                f"nothing initialises {name!r} of {type(module).__name__}: values set in its constructor are lost; "
                "give the module a method reset_parameters that sets them, or the layer a function initialise=..."
            )
        tensor.copy_(values)

    return fill


def _draw(module: Any, initialise: ModuleInitialiser | None, generator: torch.Generator) -> None:
    reset = getattr(module, "reset_parameters", None) or getattr(module, "_reset_parameters", None)
    with torch.random.fork_rng(devices=[]):
        # `reset_parameters` draws from torch's global generator.
        torch.manual_seed(generator.initial_seed())
        if callable(reset):
            reset()
        kind = type(module)
        if kind.__module__.startswith("spikingjelly.") and "ThresholdDependentBatchNorm" in kind.__name__:
            # SpikingJelly's tdBN sets its weight in the constructor only.
            nn.init.constant_(module.weight, module.alpha * module.v_th)
        if initialise is not None:
            # Parts first, as in Module.apply.
            for path, each in reversed(list(module.named_modules())):
                initialise(each, path)


def _unset_values(tensor: Tensor) -> Tensor:
    """NaN, which marks values as unset; integers are 0."""
    if tensor.is_floating_point():
        # In float32, where `materialise` draws: torch draws other numbers in float64.
        return torch.full(tensor.shape, math.nan, dtype=torch.float32, device="cpu")
    return torch.full(tensor.shape, 0, dtype=tensor.dtype, device="cpu")
