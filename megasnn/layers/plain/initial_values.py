"""Initial values for plain modules, computed on a copy: modules are on the meta device."""

from __future__ import annotations

import copy
import inspect
import math
import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from megasnn.layers.facts import facts
from megasnn.layers.init import ModuleInitialiser, own_tensors, tensors_of
from megasnn.parallel.sharding import Initialiser


class _Numbers(TorchFunctionMode):
    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        options = dict(kwargs or {})
        _note_constructor(sys._getframe(1))
        makes = function in (torch.tensor, torch.as_tensor) and args and isinstance(args[0], (int, float))
        if makes and options.get("device") is None:
            options["device"] = "cpu"
        return function(*args, **options)


@contextmanager
def without_memory() -> Iterator[None]:
    """Modules made inside have no memory. Only single-number tensors have values."""
    with torch.device("meta"), _Numbers(), _other_draws(0):
        yield


@contextmanager
def _other_draws(seed: int) -> Iterator[None]:
    # Constructors draw from NumPy's and Python's global generators, too: alike on all ranks.
    numpy_state = np.random.get_state()
    python_state = random.getstate()
    np.random.seed(seed % 2**32)
    random.seed(seed)
    try:
        yield
    finally:
        np.random.set_state(numpy_state)
        random.setstate(python_state)


def _note_constructor(frame: FrameType | None) -> None:
    """Notes the arguments of the module's constructor that is running in a frame or its callers, if any."""
    while frame is not None and _module_of_constructor(frame) is None:
        frame = frame.f_back
    if frame is None:
        return
    module = _module_of_constructor(frame)
    # A constructor calls those of its base classes.
    while frame.f_back is not None and _module_of_constructor(frame.f_back) is module:
        frame = frame.f_back
    if module is not None and frame.f_code is getattr(type(module).__init__, "__code__", None):
        facts(module).constructor = facts(module).constructor or _arguments(frame)


def _module_of_constructor(frame: FrameType) -> nn.Module | None:
    """The module whose constructor a frame runs."""
    if frame.f_code.co_name != "__init__":
        return None
    owner = frame.f_locals.get("self")
    return owner if isinstance(owner, nn.Module) else None


def _arguments(frame: FrameType) -> dict[str, Any] | None:
    """A constructor's arguments by name; None if they hold tensors, or have no names."""
    code = frame.f_code
    if code.co_flags & inspect.CO_VARARGS:
        return None
    count = code.co_argcount + code.co_kwonlyargcount
    found = {name: frame.f_locals[name] for name in code.co_varnames[1:count]}
    if code.co_flags & inspect.CO_VARKEYWORDS:
        found |= frame.f_locals[code.co_varnames[count]]
    for value in found.values():
        if isinstance(value, Tensor) or (isinstance(value, nn.Module) and next(tensors_of(value), None) is not None):
            return None
    return found


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

    A tensor that neither sets has the value of the constructor, which is called again with its arguments. The result
    raises ValueError if that is not possible.
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
            constructed = _construct_again(module, generator).get(name)
            if constructed is None:
                raise ValueError(
                    f"nothing initialises {name!r} of {type(module).__name__}: its constructor leaves it unset, or it "
                    "takes tensors or makes those of other modules, and is not called again; give the module a method "
                    "reset_parameters that sets it, or the layer a function initialise=..."
                )
            values = constructed
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


def _construct_again(module: nn.Module, generator: torch.Generator) -> dict[str, Tensor]:
    """Tensors as a module's constructor sets them, drawn from a generator; empty if it is not called."""
    arguments = facts(module).constructor
    # With other modules in it, a whole network would be made for each of its tensors.
    has_more = len([*tensors_of(module)]) > len([*own_tensors(module)])
    if arguments is None or has_more:
        return {}
    seed = generator.initial_seed()
    with torch.random.fork_rng(devices=[]), _other_draws(seed), torch.device("cpu"), _nan_in_new_memory():
        torch.manual_seed(seed)
        again = type(module)(**arguments)
    # NaN where the constructor leaves what torch.empty gave it.
    return {name: tensor.detach() for name, tensor in own_tensors(again) if not tensor.isnan().any()}


@contextmanager
def _nan_in_new_memory() -> Iterator[None]:
    """Makes torch.empty and torch.Tensor(size) return NaN inside, by torch's deterministic mode."""
    was_on = torch.are_deterministic_algorithms_enabled()
    warned = torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(was_on, warn_only=warned)


def _unset_values(tensor: Tensor) -> Tensor:
    """NaN, which marks values as unset; integers are 0."""
    if tensor.is_floating_point():
        # In float32, where `materialise` draws: torch draws other numbers in float64.
        return torch.full(tensor.shape, math.nan, dtype=torch.float32, device="cpu")
    return torch.full(tensor.shape, 0, dtype=tensor.dtype, device="cpu")
