"""The bytes of a model's layers at a size of tensor and context parallelism, counted on one process.

The other ranks are pretended: a transport gives back what it is given, so that layers compute with values that mean
nothing and tensors of the right sizes, and what they exchange is counted.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from megasnn.config import PretrainConfig
from megasnn.grid import ContextCut
from megasnn.kernels.products import can_be_sparse
from megasnn.layers import BuildContext, ParallelConv, ParallelLinear
from megasnn.models.build import building_problems
from megasnn.models.description import ModelDescription
from megasnn.parallel.sharding import sharded_tensors
from megasnn.parallel_state import ParallelState
from megasnn.pipeline.cost_model import LayerCost
from megasnn.pipeline.profile_layers import COUNTED_AS_THEY_ARE, TRIAL_SAMPLES, count_memory
from megasnn.planner.analysis import Counted, HeldTensor
from megasnn.planner.pretended import pretended_ranks
from megasnn.precisions import PRECISIONS

CPU = torch.device("cpu")


def counted(
    model: ModelDescription,
    config: PretrainConfig,
    tensor: int,
    context: int = 1,
    cut: ContextCut = "samples",
    on_cpu: bool = False,
) -> Counted:
    """Counts in trial steps what the first of so many ranks keeps, or says why it cannot be."""
    if refused := refusal_of(config, tensor, context, cut):
        return Counted(tensor, context, cut, refused)
    with pretended_ranks(tensor, context) as state:
        built_for = context_of(state, config, cut, on_cpu)
        costs = tuple(count_memory(model, size, built_for, CPU, repeats=True).layers for size in trial_sizes(config))
        return Counted(tensor, context, cut, None, costs, _tensors(model, built_for))


def refusal_of(config: PretrainConfig, tensor: int, context: int = 1, cut: ContextCut = "samples") -> str | None:
    """Returns why the model cannot be built for so many ranks; None where it can."""
    wrong = config.model.problems(tensor)
    wrong = wrong or building_problems(config.model, config.neuron.spec, tensor, context, cut)
    return wrong[0] if wrong else None


def extrapolated(model: ModelDescription, config: PretrainConfig, alone: Counted, some: Counted, size: int) -> Counted:
    """Computes what one of `size` ranks keeps, from one rank and from some ranks that were counted.

    A share of channels takes whole + cut / n bytes; a share of rows cut / n, and the rows of its neighbours. Trial
    steps of 224 x 224 pixels take seconds for each size, and this none.
    """
    is_rows = some.context > 1
    tensor, context = (1, size) if is_rows else (size, 1)
    if refused := refusal_of(config, tensor, context, some.cut):
        return Counted(tensor, context, some.cut, refused)
    counted_at = some.context if is_rows else some.tensor
    costs = tuple(
        tuple(_share(one, part, counted_at, size, is_rows) for one, part in zip(ones, parts, strict=True))
        for ones, parts in zip(alone.costs, some.costs, strict=True)
    )
    tensors = alone.tensors
    if not is_rows:
        with pretended_ranks(size, 1) as state:
            tensors = _tensors(model, context_of(state, config, "samples", False))
    return Counted(tensor, context, some.cut, None, costs, tensors)


def _share(alone: LayerCost, part: LayerCost, counted_at: int, size: int, is_rows: bool) -> LayerCost:
    def bytes_of(one: int, some: int) -> int:
        if is_rows:
            return round(max(some - one / counted_at, 0) + one / size)
        cut = (one - some) / (1 - 1 / counted_at)
        return max(0, round(one - cut + cut / size))

    def optional(one: int | None, some: int | None) -> int | None:
        return some if one is None or some is None else bytes_of(one, some)

    received = (1 - 1 / size) / (1 - 1 / counted_at)  # of what all ranks have, a rank receives the others' part
    forward, inputs, weights = map(bytes_of, alone.working, part.working)
    counts: dict[str, Any] = {name: bytes_of(getattr(alone, name), getattr(part, name)) for name in WHOLE}
    counts |= {name: optional(getattr(alone, name), getattr(part, name)) for name in OPTIONAL}
    exchanged = part.exchanged if is_rows else round(part.exchanged * received)
    return replace(part, working=(forward, inputs, weights), exchanged=exchanged, **counts)


WHOLE = "held", "message", "gradient", "parameters", "found", "cast"
OPTIONAL = "deferred", "output"


def _tensors(model: ModelDescription, built_for: BuildContext) -> tuple[tuple[HeldTensor, ...], ...]:
    return tuple(tuple(_tensors_of(name, layer)) for name, layer in model.named_layers(built_for))


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
