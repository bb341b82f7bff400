"""`analyze`: each axis' possible sizes, and layer costs at these sizes, for a costs file.

Bytes are counted in one process. torch's `fake` process group stands for the other ranks: its exchanges move nothing.
Layers compute meaningless values in tensors of the right sizes, and their exchanges' bytes are counted.

Seconds are measured on one rank alone, and on all ranks at the same time.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.testing._internal.distributed.fake_pg import FakeStore

from megasnn.common.files import quantity
from megasnn.common.grid import ContextCut, Grid
from megasnn.common.memory import keep_free_memory, processor_name, release_free_memory, resident_memory_mb
from megasnn.config import PretrainConfig
from megasnn.config.checks import ConfigError
from megasnn.layers import ParallelConv, ParallelLinear
from megasnn.layers.context import BuildContext, Numerics
from megasnn.layers.tensors import sharded_tensors
from megasnn.models.build import building_problems, describe_model
from megasnn.models.description import ModelDescription
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
from megasnn.planner.costs_file import (
    Analysis,
    CutAxis,
    LayoutBytes,
    PlannedLayer,
    ResidentTensor,
    Timed,
    cost_identity,
)
from megasnn.planner.machines import DEVICES, Machine
from megasnn.planner.uncomputed import UncomputedConvolutions

TENSOR_SIZES = (1, 2, 3, 4, 6, 8, 12, 16)
CONTEXT_SIZES = (2, 3, 4, 6, 8, 12, 16, 24, 32)
CPU = torch.device("cpu")


def analyze(config: PretrainConfig, measure: bool = False) -> Analysis:
    """Analyses a model for `plan`.

    Under torchrun with `measure`, all ranks call it and get the same result.

    Args:
        measure: measure layer seconds on this device, and its link between several ranks.
    Raises:
        ConfigError: one rank cannot build the model.
    """
    wrong = config.model.problems(1) or building_problems(config.model, config.neuron.spec)
    if wrong:
        raise ConfigError(wrong)
    description = describe_model(config.model, config.neuron.spec)
    if not measure:
        return counted_sizes(description, config)

    # Counting needs fake ranks, so that it comes before the real process group.
    device, _ = choose_device(config.parallel.device)
    counted = None
    if os.environ.get("RANK", "0") == "0":
        counted = counted_sizes(description, config, device.type == "cpu")
    return measured(description, config, counted)


def counted_sizes(description: ModelDescription, config: PretrainConfig, on_cpu: bool = False) -> Analysis:
    """Analyses a model without seconds. No process group may exist.

    Args:
        on_cpu: count a CPU's run, which may use sparse products; otherwise all are dense.
    """
    layers = []
    for layer in description.layers:
        # Outputs with five dimensions are images, [T, N, C, H, W].
        rows = [each.shape[3] for each in layer.entries.values() if len(each.shape) == 5]
        most_rows = max(rows, default=1)
        layers.append(PlannedLayer(layer.name, layer.layer_group, layer.parameters, layer.operations, most_rows))
    tensor_sizes = sorted({*TENSOR_SIZES, config.parallel.tensor_model_parallel_size})
    context_sizes = sorted({*CONTEXT_SIZES, config.parallel.context_parallel_size} - {1})
    # Any number of ranks can share samples, or none.
    samples = _refusal(config, 1, 2, "samples")
    possible: dict[CutAxis, dict[int, str | None]] = {
        "tensor": {size: _refusal(config, size, 1, "samples") for size in tensor_sizes},
        "samples": dict.fromkeys(context_sizes, samples),
        "rows": {size: _refusal(config, 1, size, "rows") for size in context_sizes},
    }
    if any(spec.over_tokens for spec in config.model.inputs.values()):
        possible["tokens"] = {size: _refusal(config, 1, size, "tokens") for size in context_sizes}
    shared: dict[CutAxis, LayoutBytes] = {}
    larger: dict[CutAxis, tuple[LayoutBytes, ...]] = {}
    for axis, sizes in possible.items():
        able = [size for size, refused in sizes.items() if size > 1 and refused is None]
        if not able:
            continue
        tensor = able[0] if axis == "tensor" else 1
        context = 1 if axis == "tensor" else able[0]
        cut: ContextCut = "samples" if axis == "tensor" else axis
        shared[axis] = count_layers(description, config, tensor, context, cut, on_cpu)
        if axis == "tokens":
            counts = sorted({able[len(able) // 2], able[-1]} - {able[0]})
            larger[axis] = tuple(count_layers(description, config, 1, size, axis, on_cpu) for size in counts)
    return Analysis(
        model=config.model.name,
        about=cost_identity(config),
        layers=tuple(layers),
        sizes=trial_sizes(config),
        alone=count_layers(description, config, 1, on_cpu=on_cpu),
        shared=shared,
        possible=possible,
        larger=larger,
    )


def count_layers(
    description: ModelDescription,
    config: PretrainConfig,
    tensor: int,
    context: int = 1,
    cut: ContextCut = "samples",
    on_cpu: bool = False,
) -> LayoutBytes:
    """The layers' bytes on the first rank, in trial steps; of ranks that divide tokens, on the last one."""
    # On a CPU the values of a convolution decide where sums over spikes replace products.
    computed: AbstractContextManager[object] = nullcontext() if on_cpu else UncomputedConvolutions()
    # The last tokens' rank receives most: the keys and values, or the states, of all earlier tokens.
    rank = context - 1 if cut == "tokens" else 0
    with fake_ranks(tensor, context, rank) as state, computed:
        built_for = context_of(state, config, cut, on_cpu)
        costs = tuple(count_memory(description, size, built_for, CPU).layers for size in trial_sizes(config))
        tensors = [tuple(_tensors_of(name, layer)) for name, layer in description.named_layers(built_for)]
        return LayoutBytes(tensor, context, cut, costs, tuple(tensors))


def trial_sizes(config: PretrainConfig) -> tuple[int, ...]:
    """Samples in trial steps: as in a run's own forecast."""
    sizes = {*TRIAL_SAMPLES}
    if config.training.micro_batch_size <= COUNTED_AS_THEY_ARE:
        sizes.add(config.training.micro_batch_size)
    return tuple(sorted(sizes))


@contextmanager
def fake_ranks(tensor: int, context: int, rank: int) -> Iterator[ParallelState]:
    """Yields a rank's state. No process group may exist."""
    if tensor * context > 1:
        dist.init_process_group("fake", rank=rank, world_size=tensor * context, store=FakeStore())
    try:
        # torch's fake group refuses an exchange in which a rank only receives, as the first rank by rows does.
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
    return replace(one_rank(config, on_cpu), state=state, context_cut=cut)


def one_rank(config: PretrainConfig, on_cpu: bool) -> BuildContext:
    """A single rank's context. `on_cpu`: form products as runs on a CPU do; otherwise all are dense."""
    device = CPU if on_cpu else torch.device("cuda")
    return BuildContext(numerics=Numerics.of_run(config, device))


def _refusal(config: PretrainConfig, tensor: int, context: int, cut: ContextCut) -> str | None:
    """Why the model cannot be built at these sizes; None if it can."""
    wrong = config.model.problems(tensor)
    wrong = wrong or building_problems(config.model, config.neuron.spec, Grid(tp=tensor, cp=context), cut)
    return wrong[0] if wrong else None


def _tensors_of(name: str, layer: nn.Module) -> Iterator[ResidentTensor]:
    # Weights of products travel in the type of the products, everything else in its own.
    multiplied = {}
    for module in layer.modules():
        if isinstance(module, (ParallelConv, ParallelLinear)):
            multiplied[module.weight] = module.compute_dtype.itemsize
    for entry in sharded_tensors([(name, layer)]):
        itemsize = entry.tensor.itemsize
        yield ResidentTensor(
            name=entry.name,
            shape=tuple(entry.tensor.shape),
            itemsize=itemsize,
            is_parameter=entry.is_parameter,
            travels=multiplied.get(entry.tensor, itemsize),
        )


def measured(description: ModelDescription, config: PretrainConfig, known: Analysis | None) -> Analysis:
    """Measures seconds and the machine. Collective over torchrun's ranks.

    Args:
        known: the analysis without seconds, on the first rank.
    """
    keep_free_memory()  # as an Engine does
    joined_before = dist.is_initialized()
    device = start_process_group(config.parallel.device)
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    context = one_rank(config, device.type == "cpu")
    samples = config.training.micro_batch_size
    timed = []
    link = None
    if known is not None:
        timed.append(_timed(profile_layers(description, samples, context, device), samples, 1))
    if ranks > 1:
        try:
            # Profiling as pipeline stages measures their link, too.
            context = replace(context, state=initialize_model_parallel(pp=ranks, device=device))
            costs = profile_pipeline(description, samples, context)
        finally:
            destroy_model_parallel()
        timed.append(_timed(costs.layers, samples, ranks))
        link = costs.link

    def put_together() -> Analysis:
        assert known is not None, "the first rank has it"
        return replace(known, timed=tuple(timed), machine=_machine(device, link, ranks))

    found = broadcast_result(dist.group.WORLD if ranks > 1 else None, put_together)
    if ranks > 1 and not joined_before:
        dist.destroy_process_group()
    return found


def _machine(device: torch.device, link: LinkCost | None, ranks: int) -> Machine:
    """The measured machine. Its rates, from the table, scale seconds to other sizes.

    Args:
        link: between two ranks; None with one rank.
    """
    release_free_memory()
    if device.type == "cpu":
        base = DEVICES["cpu-core"]
        base = replace(base, name=processor_name(), program=1e6 * resident_memory_mb(device))
    else:
        memory = float(torch.cuda.get_device_properties(device).total_memory)
        base = replace(DEVICES["h100"], name=torch.cuda.get_device_name(device), memory=memory)
    return replace(
        base,
        least=0.0,
        start=0.0,
        graph_start=None,
        within=link or base.within,
        source=f"measured with {quantity(ranks, 'rank')}" + ("" if link else ", links from the table of devices"),
    )


def _timed(layers: Sequence[LayerCost], samples: int, ranks: int) -> Timed:
    return Timed(samples, ranks, tuple((each.forward, each.input_gradient, each.weight_gradient) for each in layers))
