"""Tells what is wrong with a model that a run is asked to train, by building its layers without memory."""

from __future__ import annotations

from megasnn.config import ModelConfig
from megasnn.grid import ContextCut
from megasnn.kernels import NeuronSpec
from megasnn.layers import BuildContext
from megasnn.models.building import describe
from megasnn.parallel_state import Group


def building_problems(
    model: ModelConfig,
    neuron: NeuronSpec,
    tensor_parallel: int,
    context_parallel: int = 1,
    cut: ContextCut = "samples",
) -> list[str]:
    """Lists why a model cannot be built for the first of so many tensor-parallel ranks, or shared by so many
    context-parallel ranks."""
    contexts = []
    if context_parallel > 1:
        contexts.append(BuildContext(context=Group("context", tuple(range(context_parallel))), cut=cut))
    if tensor_parallel > 1:
        contexts.append(BuildContext(tensor=Group("tensor", tuple(range(tensor_parallel)))))
    try:
        described = describe(model, neuron)
        for context in contexts:
            described.build(context)
    except ValueError as error:
        return [f"{model.name}: {error}"]
    return []
