"""What is wrong with a model that a run is asked to train, found out by building its layers without memory."""

from __future__ import annotations

from dataclasses import fields, replace
from types import NoneType
from typing import Any

from megasnn.comm.group import Group
from megasnn.config import ModelConfig
from megasnn.config.checks import flag
from megasnn.kernels import SURROGATES, NeuronSpec
from megasnn.layers import BuildContext
from megasnn.models.building import built, describe
from megasnn.models.description import ModelDescription


def building_problems(model: ModelConfig, neuron: NeuronSpec, tensor_parallel: int) -> list[str]:
    """Why a model cannot be built for the first of so many tensor parallel ranks; flags of neurons that it ignores."""
    try:
        described = describe(model, neuron)
    except ValueError as error:
        return [f"{model.name}: {error}"]
    problem = _problem_of_cut(described, tensor_parallel)
    if problem is not None:
        flags = _flags_that_cut(model, neuron, tensor_parallel, problem)
        return [f"{model.name}: {problem}" + (f" (change {flags})" if flags else "")]
    return _neuron_flags_in_vain(model, neuron)


def _problem_of_cut(described: ModelDescription, tensor_parallel: int) -> str | None:
    """Why layers that one rank can have cannot be built for the first of so many tensor parallel ranks."""
    try:
        described.build(BuildContext(tensor=Group("tensor", tuple(range(tensor_parallel)))))
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
    wrong = []
    for each in fields(given):
        without = replace(given, **{each.name: getattr(usual, each.name)})
        if without != given and _settings(model, without) == _settings(model, given):
            name = flag({"kind": "neuron", "alpha": "surrogate_alpha"}.get(each.name, each.name))
            wrong.append(f"{name} changes nothing in {model.name}: no neuron of it takes this from the flags")
    return wrong


def _settings(model: ModelConfig, neuron: NeuronSpec) -> list[dict[str, object]]:
    """What the modules of a model with this neuron say about themselves in plain values."""
    modules = [module for each in built(model, neuron=neuron) for module in each.module.modules()]
    plain = (bool, int, float, str, NoneType, NeuronSpec)
    return [{name: value for name, value in vars(module).items() if isinstance(value, plain)} for module in modules]
