"""The bytes of a model's layers at a size of tensor and context parallelism, counted on one process.

The other ranks are pretended: a transport gives back what it is given, so that layers compute with values that mean
nothing and tensors of the right sizes, and what they exchange is counted.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import nn

from megasnn.config import PretrainConfig
from megasnn.grid import ContextCut
from megasnn.kernels.products import can_be_sparse
from megasnn.layers import BuildContext, ParallelConv, ParallelLinear
from megasnn.models.description import ModelDescription
from megasnn.models.problems import building_problems
from megasnn.parallel_state import ParallelState
from megasnn.pipeline.p2p import WireOptions
from megasnn.pipeline.profile_layers import COUNTED_AS_THEY_ARE, TRIAL_SAMPLES, count_memory
from megasnn.planner.analysis import Counted, HeldTensor
from megasnn.planner.pretended import pretended_ranks
from megasnn.precisions import PRECISIONS
from megasnn.sharded_tensors import sharded_tensors

CPU = torch.device("cpu")


def counted(
    model: ModelDescription,
    config: PretrainConfig,
    tensor: int,
    context: int = 1,
    cut: ContextCut = "samples",
    on_cpu: bool = False,
) -> Counted:
    """What the first of so many ranks has and keeps, or why it cannot be. Args: on_cpu: as of `one_rank`."""
    refused = config.model.problems(tensor)
    neuron = config.neuron
    refused = refused or building_problems(config.model, neuron.spec, tensor, context, cut)
    if refused:
        return Counted(tensor, context, cut, refused[0])
    with pretended_ranks(tensor, context) as state:
        built_for = context_of(state, config, cut, on_cpu)
        wires = wires_of(config)
        costs = tuple(
            count_memory(model, size, built_for, CPU, wires, repeats=True).layers for size in trial_sizes(config)
        )
        layers = model.named_layers(built_for)
        tensors = tuple(tuple(_tensors_of(name, layer)) for name, layer in layers)
    return Counted(tensor, context, cut, None, costs, tensors)


def trial_sizes(config: PretrainConfig) -> tuple[int, ...]:
    """Numbers of samples that are counted: those that a run tries, and where it would count its own, these too."""
    own = config.training.micro_batch_size
    return tuple(sorted({*TRIAL_SAMPLES, own} if own <= COUNTED_AS_THEY_ARE else TRIAL_SAMPLES))


def context_of(state: ParallelState, config: PretrainConfig, cut: ContextCut, on_cpu: bool) -> BuildContext:
    """What layers are built with on a rank of a grid."""
    return replace(one_rank(config, on_cpu), tensor=state.tensor, context=state.context, cut=cut)


def one_rank(config: PretrainConfig, on_cpu: bool) -> BuildContext:
    """The same for a rank that shares nothing.

    Args:
        on_cpu: whether products are formed as runs form them on a CPU; otherwise all are dense.
    """
    types, backend = PRECISIONS[config.training.precision], config.neuron.neuron_backend
    weights, products = getattr(torch, types.weights), getattr(torch, types.products)
    sparse = on_cpu and config.training.sparse_products == "auto" and can_be_sparse(CPU, products)
    return BuildContext(dtype=weights, compute_dtype=products, neuron_backend=backend, sparse_products=sparse)


def wires_of(config: PretrainConfig) -> WireOptions:
    """How tensors travel between stages."""
    return WireOptions()


def _tensors_of(name: str, layer: nn.Module) -> Iterator[HeldTensor]:
    multiplied = {
        module.weight: module.compute_dtype.itemsize
        for module in layer.modules()
        if isinstance(module, (ParallelConv, ParallelLinear))
    }
    for entry in sharded_tensors([(name, layer)]):
        shape, size = tuple(entry.tensor.shape), entry.tensor.itemsize
        travels = multiplied.get(entry.tensor, size)
        yield HeldTensor(entry.name, shape, size, entry.is_parameter, travels)
