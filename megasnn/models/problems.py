"""What is wrong with a model that a run is asked to train, found out by building its layers without memory."""

from __future__ import annotations

import inspect
from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import fields, replace
from functools import partial
from types import CodeType, NoneType
from typing import Any

from torch import Tensor

from megasnn.comm.group import Group
from megasnn.config import ModelConfig
from megasnn.config.checks import flag
from megasnn.grid import ContextCut
from megasnn.kernels import SURROGATES, NeuronSpec
from megasnn.kernels.backends import BACKENDS
from megasnn.layers import BuildContext, ParallelNeuron
from megasnn.models.building import built, describe
from megasnn.models.description import ModelDescription


def building_problems(
    model: ModelConfig,
    neuron: NeuronSpec,
    tensor_parallel: int,
    neuron_backend: str = "auto",
    context_parallel: int = 1,
    cut: ContextCut = "samples",
) -> list[str]:
    """Why a model cannot be built for the first of so many tensor parallel ranks, or shared by so many context parallel
    ranks; flags of neurons that it ignores."""
    try:
        described = describe(model, neuron)
    except ValueError as error:
        return [f"{model.name}: {error}"]
    cannot_share = _problem_of_sharing(described, context_parallel, cut)
    if cannot_share is not None:
        return [f"{model.name}: {cannot_share}"]
    problem = _problem_of_cut(described, tensor_parallel)
    if problem is not None:
        flags = _flags_that_cut(model, neuron, tensor_parallel, problem)
        return [f"{model.name}: {problem}" + (f" (change {flags})" if flags else "")]
    return _neuron_flags_in_vain(model, neuron) + _backend_in_vain(model, neuron_backend)


def _problem_of_cut(described: ModelDescription, tensor_parallel: int) -> str | None:
    """Why layers that one rank can have cannot be built for the first of so many tensor parallel ranks."""
    return _problem_of(described, BuildContext(tensor=Group("tensor", tuple(range(tensor_parallel)))))


def _problem_of_sharing(described: ModelDescription, context_parallel: int, cut: ContextCut) -> str | None:
    """Why ranks cannot share what these layers take, and how many could: a layer mixes it, or there is too little."""
    if context_parallel == 1:
        return None

    def problem_of(ranks: int) -> str | None:
        return _problem_of(described, BuildContext(context=Group("context", tuple(range(ranks))), cut=cut))

    problem = problem_of(context_parallel)
    if problem is None or cut == "samples":
        return problem
    fewer = range(2, context_parallel)
    most = 1 + bisect_left(fewer, True, key=lambda ranks: problem_of(ranks) is not None)
    by_rows = f"by rows {most} ranks can share this model" if most > 1 else "fewer ranks cannot share it by rows either"
    return f"{problem}; {by_rows}, by samples as many as --micro-batch-size has"


def _problem_of(described: ModelDescription, context: BuildContext) -> str | None:
    try:
        described.build(context)
    except ValueError as error:
        return str(error)
    return None


def _flags_that_cut(model: Any, neuron: NeuronSpec, tensor_parallel: int, problem: str) -> str:
    """The flags that give a model sizes which cannot be cut: with so many times their value there is no such problem,
    or one in a later layer."""
    found = []
    for each in fields(model):
        value = getattr(model, each.name)
        if type(value) is int:
            larger = replace(model, **{each.name: value * tensor_parallel})
            if larger.problems(tensor_parallel):
                continue
            try:
                described = describe(larger, neuron)
            except ValueError:
                continue
            if _problem_of_cut(described, tensor_parallel) != problem:
                found.append(f"{flag(each.name)} {value}")
    return " or ".join(found)


def _neuron_flags_in_vain(model: ModelConfig, given: NeuronSpec) -> list[str]:
    """Flags of the neuron with another value than their default, which no layer of the model takes."""
    usual = model.neuron().spec
    if given.surrogate != usual.surrogate:
        usual = replace(usual, alpha=SURROGATES[given.surrogate].alpha)
    if given == usual:
        return []
    wrong, found = [], _contents(model, given)
    for each in fields(given):
        without = replace(given, **{each.name: getattr(usual, each.name)})
        if without != given and _contents(model, without) == found:
            name = flag({"kind": "neuron", "alpha": "surrogate_alpha"}.get(each.name, each.name))
            wrong.append(f"{name} changes nothing in {model.name}: no neuron of it takes this from the flags")
    return wrong


def _backend_in_vain(model: ModelConfig, backend: str) -> list[str]:
    """A choice of kernels for a model without neurons that they compute."""
    modules = (module for each in built(model) for module in each.module.modules())
    if backend in BACKENDS.also or any(isinstance(module, ParallelNeuron) for module in modules):
        return []
    return [f"--neuron-backend {backend} changes nothing in {model.name}: no neuron of it is computed by our kernels"]


def _contents(model: ModelConfig, neuron: NeuronSpec) -> list[object]:
    """What the layers of a model with this neuron consist of, but for values of tensors."""
    return [_comparable(each.module, {}) for each in built(model, neuron=neuron)]


def _comparable(value: Any, seen: dict[int, tuple[int, object]]) -> object:
    """What a value consists of, equal for values that were made in the same way.

    Args:
        seen: the objects that were come by, by their ids, with their numbers: they may refer to each other.
    """
    if isinstance(value, (bool, int, float, complex, str, bytes, NoneType, CodeType)):
        return value
    if isinstance(value, Tensor):
        return value.shape, value.dtype
    if id(value) in seen:
        return type(value), seen[id(value)][0]
    seen[id(value)] = len(seen), value  # kept, lest another object get its id
    if isinstance(value, (set, frozenset)):
        return type(value), sorted(map(repr, value))
    parts: list[object] = list(vars(value).items()) if hasattr(value, "__dict__") else []
    if isinstance(value, Mapping):
        parts += value.items()
    elif isinstance(value, (list, tuple)):
        parts += value
    elif isinstance(value, partial):
        parts += (value.func, value.args, value.keywords)
    elif inspect.ismethod(value):
        parts += (value.__func__, value.__self__)
    elif inspect.isfunction(value):
        parts += (value.__code__, value.__defaults__, *(cell.cell_contents for cell in value.__closure__ or ()))
    elif isinstance(value, type):
        parts = [value.__qualname__]
    return type(value), [_comparable(part, seen) for part in parts]
