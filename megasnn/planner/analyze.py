"""`analyze`: the axes that a model can be cut along, and the cost of its layers at each size, for a costs file.

Sizes are counted on one process. The other ranks are torch's `fake` process group: exchanges give back what was there,
so that layers compute with values that mean nothing and tensors of the right sizes, and what they exchange is counted.

Seconds are measured on one rank alone, and on all ranks at the same time.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.testing._internal.distributed.fake_pg import FakeStore

from megasnn.common.grid import ContextCut
from megasnn.common.memory import keep_free_memory, processor_name, release_free_memory, resident_memory_mb
from megasnn.config import PretrainConfig
from megasnn.config.checks import ConfigError
from megasnn.layers import ParallelConv, ParallelLinear
from megasnn.layers.context import BuildContext, Numerics
from megasnn.layers.tensors import sharded_tensors
from megasnn.models.build import building_problems, describe_model
from megasnn.models.description import LayerDescription, ModelDescription
from megasnn.parallel.agreement import broadcast_result
from megasnn.parallel.process_group import choose_device, start_process_group
from megasnn.parallel_state import ParallelState, destroy_model_parallel, initialize_model_parallel
from megasnn.pipeline.cost_model import LayerCost, LinkCost
from megasnn.pipeline.profile_layers import (
    COUNTED_AS_THEY_ARE,
    TRIAL_SAMPLES,
    count_memory,
    profile_layers,
    profile_pipeline,
)
from megasnn.planner.costs import Analysis, Counted, CutAxis, LayerFacts, ResidentTensor, Timed, cost_identity
from megasnn.planner.machines import DEVICES, Machine

TENSOR_SIZES = 1, 2, 3, 4, 6, 8, 12, 16
CONTEXT_SIZES = 2, 3, 4, 6, 8, 12, 16, 24, 32
CPU = torch.device("cpu")


def analyze(config: PretrainConfig, measure: bool = False) -> Analysis:
    """Analysis of a model, as `plan` needs it.

    With `measure` it is called in a process by itself, or in each that torchrun has started: these measure together,
    and the result is the same on all of them.

    Args:
        measure: seconds of the layers are measured on this device, and its links where there are several ranks.
    Raises:
        ConfigError: one rank cannot build the model.
    """
    if wrong := config.model.problems(1) or building_problems(config.model, config.neuron.spec, 1):
        raise ConfigError(wrong)
    description = describe_model(config.model, config.neuron.spec)
    if not measure:
        return counted_sizes(description, config)

    device, _ = choose_device(config.parallel.device)
    is_first = os.environ.get("RANK", "0") == "0"
    counted = counted_sizes(description, config, device.type == "cpu") if is_first else None
    return measured(description, config, counted)


def counted_sizes(description: ModelDescription, config: PretrainConfig, on_cpu: bool = False) -> Analysis:
    """All that needs no clock. No process group may be there.

    Args:
        on_cpu: bytes are those of a run on a CPU, which may form sums over spikes; otherwise of dense products.
    """
    layers = tuple(map(_facts, description.layers))
    tensor_sizes = sorted({*TENSOR_SIZES, config.parallel.tensor_model_parallel_size})
    context_sizes = sorted({*CONTEXT_SIZES, config.parallel.context_parallel_size} - {1})
    samples = _refusal(config, 1, 2, "samples")  # whether they can be shared does not depend on the number of ranks
    possible: dict[CutAxis, dict[int, str | None]] = {
        "tensor": {size: _refusal(config, size, 1, "samples") for size in tensor_sizes},
        "samples": dict.fromkeys(context_sizes, samples),
        "rows": {size: _refusal(config, 1, size, "rows") for size in context_sizes},
    }
    shared: dict[CutAxis, Counted] = {}
    for axis, sizes in possible.items():
        size = next((size for size, refused in sizes.items() if size > 1 and refused is None), None)
        if size is not None:
            tensor, context = (size, 1) if axis == "tensor" else (1, size)
            shared[axis] = count_layers(
                description, config, tensor, context, "rows" if axis == "rows" else "samples", on_cpu
            )
    alone = count_layers(description, config, 1, on_cpu=on_cpu)
    about = cost_identity(config)
    return Analysis(config.model.name, about, layers, trial_sizes(config), alone, shared, possible)


def _facts(layer: LayerDescription) -> LayerFacts:
    rows = max((each.shape[3] for each in layer.entries.values() if len(each.shape) == 5), default=1)
    return LayerFacts(layer.name, layer.layer_group, layer.parameters, layer.operations, rows)


def count_layers(
    description: ModelDescription,
    config: PretrainConfig,
    tensor: int,
    context: int = 1,
    cut: ContextCut = "samples",
    on_cpu: bool = False,
) -> Counted:
    """Counts in trial steps what the first of so many ranks keeps."""
    with fake_ranks(tensor, context) as state:
        built_for = context_of(state, config, cut, on_cpu)
        costs = tuple(count_memory(description, size, built_for, CPU).layers for size in trial_sizes(config))
        return Counted(tensor, context, cut, costs, _tensors(description, built_for))


def trial_sizes(config: PretrainConfig) -> tuple[int, ...]:
    """Numbers of samples that are counted: those that a run tries, and where it would count its own, these too."""
    own = config.training.micro_batch_size
    return tuple(sorted({*TRIAL_SAMPLES, own} if own <= COUNTED_AS_THEY_ARE else TRIAL_SAMPLES))


@contextmanager
def fake_ranks(tensor: int, context: int) -> Iterator[ParallelState]:
    """Yields the state of the first of so many ranks that share layers and micro-batches. No process group may be
    there."""
    if tensor * context > 1:
        dist.init_process_group("fake", rank=0, world_size=tensor * context, store=FakeStore())
    try:
        # torch's own refuses an exchange in which this rank only receives, as the first rank of a share by rows does.
        with patch.object(dist, "all_to_all_single", _exchange):
            yield initialize_model_parallel(tp=tensor, device=CPU, cp=context)
    finally:
        destroy_model_parallel()
        if dist.is_initialized():
            dist.destroy_process_group()


def _exchange(received: Tensor, *_: Any, **__: Any) -> Any:
    received.zero_()
    return dist.barrier(async_op=True)


def context_of(state: ParallelState, config: PretrainConfig, cut: ContextCut, on_cpu: bool) -> BuildContext:
    """Context that layers are built with on a rank of a grid."""
    return replace(one_rank(config, on_cpu), state=state, cut=cut)


def one_rank(config: PretrainConfig, on_cpu: bool) -> BuildContext:
    """The same for a rank that shares nothing.

    Args:
        on_cpu: products are formed as runs form them on a CPU; otherwise all are dense.
    """
    device = CPU if on_cpu else torch.device("cuda")
    return BuildContext(numerics=Numerics.of_run(config, device))


def _refusal(config: PretrainConfig, tensor: int, context: int, cut: ContextCut) -> str | None:
    """Why the model cannot be built for so many ranks; None where it can."""
    wrong = config.model.problems(tensor)
    wrong = wrong or building_problems(config.model, config.neuron.spec, tensor, context, cut)
    return wrong[0] if wrong else None


def _tensors(description: ModelDescription, built_for: BuildContext) -> tuple[tuple[ResidentTensor, ...], ...]:
    return tuple(tuple(_tensors_of(name, layer)) for name, layer in description.named_layers(built_for))


def _tensors_of(name: str, layer: nn.Module) -> Iterator[ResidentTensor]:
    multiplied = {
        module.weight: module.compute_dtype.itemsize
        for module in layer.modules()
        if isinstance(module, (ParallelConv, ParallelLinear))
    }
    for entry in sharded_tensors([(name, layer)]):
        shape, size = tuple(entry.tensor.shape), entry.tensor.itemsize
        yield ResidentTensor(entry.name, shape, size, entry.is_parameter, multiplied.get(entry.tensor, size))


def measured(description: ModelDescription, config: PretrainConfig, known: Analysis | None) -> Analysis:
    """Measured costs, with the machine that they are of. Collective over the ranks of torchrun.

    Args:
        known: on the first rank.
    """
    keep_free_memory()  # as an Engine does
    joined_before = dist.is_initialized()
    device = start_process_group(config.parallel.device)
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    context, samples = one_rank(config, device.type == "cpu"), config.training.micro_batch_size
    timed, link = [], None
    if known is not None:
        timed.append(_timed(profile_layers(description, samples, context, device), samples, 1))
    if ranks > 1:
        try:  # stages, whose link is measured
            context = replace(context, state=initialize_model_parallel(pp=ranks, device=device))
            costs = profile_pipeline(description, samples, context)
        finally:
            destroy_model_parallel()
        timed.append(_timed(costs.layers, samples, ranks))
        link = costs.link

    def put_together() -> Analysis:
        assert known is not None, "the first rank knows it"
        return replace(known, timed=tuple(timed), machine=_machine(device, link, ranks))

    found = broadcast_result(dist.group.WORLD if ranks > 1 else None, put_together)
    if ranks > 1 and not joined_before:
        dist.destroy_process_group()
    return found


def _machine(device: torch.device, link: LinkCost | None, ranks: int) -> Machine:
    """The machine that seconds were measured on; sizes that were not measured are scaled by rates of the table.

    Args:
        link: between two ranks; None where there was one.
    """
    is_cpu = device.type == "cpu"
    base = DEVICES["cpu-core" if is_cpu else "h100"]
    release_free_memory()
    return replace(
        base,
        name=processor_name() if is_cpu else torch.cuda.get_device_name(device),
        least=0.0,
        start=0.0,
        within=link or base.within,
        program=1e6 * resident_memory_mb(device) if is_cpu else base.program,
        memory=base.memory if is_cpu else float(torch.cuda.get_device_properties(device).total_memory),
        told=f"measured with {ranks} rank(s)" + ("" if link else ", links from the table of devices"),
    )


def _timed(layers: Sequence[LayerCost], samples: int, ranks: int) -> Timed:
    return Timed(samples, ranks, tuple((each.forward, each.input_gradient, each.weight_gradient) for each in layers))
