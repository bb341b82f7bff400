"""Seconds of a model's layers on this machine: on one rank alone, and on all ranks at the same time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
import torch.distributed as dist

from megasnn.config import PretrainConfig
from megasnn.grid import ContextCut
from megasnn.host_memory import keep_free_memory, release_free_memory
from megasnn.models.description import ModelDescription
from megasnn.parallel.agreement import broadcast_result
from megasnn.parallel.process_group import start_process_group
from megasnn.parallel_state import destroy_model_parallel, initialize_model_parallel
from megasnn.pipeline.cost_model import LayerCost, LinkCost, PipelineCosts
from megasnn.pipeline.profile_layers import profile_layers, profile_pipeline
from megasnn.planner.analyze import context_of, one_rank
from megasnn.planner.cost_file import Analysis, LayerSeconds, Timed
from megasnn.planner.machines import DEVICES, Machine
from megasnn.telemetry.memory import held_memory_mb, processor_name

Size = tuple[int, int, ContextCut]
ONE: Size = (1, 1, "samples")


def measured(description: ModelDescription, config: PretrainConfig, known: Analysis | None) -> Analysis:
    """Measured costs, with the machine that they are of. Collective over the ranks of torchrun.

    Args:
        known: on the first rank.
    """
    keep_free_memory()  # as an Engine does
    joined_before = dist.is_initialized()
    device = start_process_group(config.parallel.backend, config.parallel.device)
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    world = dist.group.WORLD if ranks > 1 else None
    timed, link = [], None
    if known is not None:
        alone, samples = one_rank(config, device.type == "cpu"), config.training.micro_batch_size
        layers = profile_layers(description, samples, alone, device)
        timed.append(_timed(config, layers, ONE, 1))
    if ranks > 1:
        for size in broadcast_result(world, lambda: _sizes(known, config, ranks)):
            costs = _together(description, config, device, size, ranks)
            timed.append(_timed(config, costs.layers, size, ranks))
            link = costs.link if size == ONE else link

    def put_together() -> Analysis:
        assert known is not None, "the first rank knows it"
        return replace(known, timed=tuple(timed), machine=_machine(device, link, ranks))

    found = broadcast_result(world, put_together)
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
        alone=1.0,  # seconds are there of one rank, and of all at the same time
        within=link or base.within,
        program=1e6 * held_memory_mb(device) if is_cpu else base.program,
        memory=base.memory if is_cpu else float(torch.cuda.get_device_properties(device).total_memory),
        told=f"measured with {ranks} rank(s)" + ("" if link else ", links from the table of devices"),
    )


def _sizes(known: Analysis | None, config: PretrainConfig, ranks: int) -> list[Size]:
    """Those that all ranks together have: one by one first, then sharing."""
    assert known is not None, "the first rank knows it"
    samples = config.training.micro_batch_size
    able = {axis: [size for size, why in sizes.items() if why is None] for axis, sizes in known.possible.items()}
    found: list[Size] = [ONE, *((size, 1, "samples") for size in able["tensor"] if size > 1)]
    found += [(1, size, "samples") for size in able["samples"] if size <= samples]
    found += [(1, size, "rows") for size in able["rows"]]
    return [each for each in found if ranks % (each[0] * each[1]) == 0]


def _together(
    description: ModelDescription, config: PretrainConfig, device: torch.device, size: Size, ranks: int
) -> PipelineCosts:
    """All ranks measure, in groups of this size; those that share nothing are stages, whose link is measured."""
    tensor, context, cut = size
    stages = ranks if size == ONE else 1
    state = initialize_model_parallel(tp=tensor, pp=stages, device=device, cp=context)
    try:
        built_for = context_of(state, config, cut, device.type == "cpu")
        samples = built_for.largest_share(config.training.micro_batch_size)
        return profile_pipeline(description, samples, built_for, state)
    finally:
        destroy_model_parallel()


def _timed(config: PretrainConfig, layers: Sequence[LayerCost], size: Size, ranks: int) -> Timed:
    tensor, context, cut = size
    samples = config.training.micro_batch_size
    samples = -(-samples // context) if cut == "samples" else samples
    seconds = tuple(LayerSeconds(each.forward, each.input_gradient, each.weight_gradient) for each in layers)
    return Timed(tensor, context, cut, samples, ranks, seconds)
