"""Seconds of a model's layers on this machine: on one rank alone, and on all ranks at the same time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
import torch.distributed as dist

from megasnn.config import PretrainConfig
from megasnn.host_memory import keep_free_memory, release_free_memory
from megasnn.models.description import ModelDescription
from megasnn.parallel.agreement import broadcast_result
from megasnn.parallel.process_group import start_process_group
from megasnn.parallel_state import destroy_model_parallel, initialize_model_parallel
from megasnn.pipeline.cost_model import LayerCost, LinkCost
from megasnn.pipeline.profile_layers import profile_layers, profile_pipeline
from megasnn.planner.analyze import one_rank
from megasnn.planner.cost_file import Analysis, Timed
from megasnn.planner.machines import DEVICES, Machine
from megasnn.telemetry.memory import held_memory_mb, processor_name


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
            costs = profile_pipeline(description, samples, context, initialize_model_parallel(pp=ranks, device=device))
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
        program=1e6 * held_memory_mb(device) if is_cpu else base.program,
        memory=base.memory if is_cpu else float(torch.cuda.get_device_properties(device).total_memory),
        told=f"measured with {ranks} rank(s)" + ("" if link else ", links from the table of devices"),
    )


def _timed(layers: Sequence[LayerCost], samples: int, ranks: int) -> Timed:
    return Timed(samples, ranks, tuple((each.forward, each.input_gradient, each.weight_gradient) for each in layers))
