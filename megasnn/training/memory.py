"""The memory that every rank will need, predicted before the first step and compared with the peak at the end."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict

import torch
import torch.distributed as dist

from megasnn.config import PretrainConfig
from megasnn.engine.distributed_model import DistributedModel
from megasnn.engine.setup import window_count, wire_options
from megasnn.free_memory import release_free_memory
from megasnn.grid import SUMMED_AXES
from megasnn.optim import held_state_bytes, state_bytes, working_bytes
from megasnn.parallel.sharding import ShardedTensor
from megasnn.parallel_state import ParallelState
from megasnn.pipeline.cost_model import PipelineCosts
from megasnn.pipeline.peak_memory import Moment, graphs_bytes, peak_moments
from megasnn.pipeline.plan import PipelinePlan
from megasnn.pipeline.profile_layers import count_memory
from megasnn.planner.memory import MemoryForecast, sample_bytes
from megasnn.telemetry.memory import gather_peak_memory_mb, held_memory_mb
from megasnn.telemetry.reporter import Reporter


def forecast_memory(
    config: PretrainConfig,
    distributed: DistributedModel,
    optimizer: torch.optim.Optimizer,
    plan: PipelinePlan,
    state: ParallelState,
    reporter: Reporter,
) -> list[MemoryForecast]:
    """Of every rank, the same on all of them; none where the layers cannot be tried out. Collective over the world.

    Counts the layers' memory where the plan has not; see `megasnn.pipeline.profile_layers`.
    """
    costs = _agreed_costs(config, distributed, plan, state)
    if isinstance(costs, str):
        reporter.line(f"memory is not predicted: {costs}")
        return []
    peak, owned = _peak(costs, distributed, plan), distributed.owned
    held = (*distributed.copies, *distributed.tensors)
    # Copies of a chunk's own tensors have the same memory; each has a gradient of its own.
    copies = {entry.tensor.data_ptr(): entry.tensor.nbytes for entry in held}
    averages = 0 if not config.optimizer.ema_decay else sum(entry.tensor.nbytes for entry in owned)
    weights = sum(copies.values()) + averages
    shared, schedule = plan.schedules.weights, plan.schedules.training(plan.micro_batches)
    rank = state.pipeline.rank
    gathered, buffers = (0, 0) if shared is None else shared.gathered_and_buffers(schedule, rank)
    gradients = distributed.data_parallel.held_bytes
    moments = _moments(owned, config)
    on_host = state.device.type == "cpu"  # on a GPU, its memory is what is foretold: the host's copies are not in it
    snapshots = on_host and config.checkpoint.async_save
    written = [entry for entry in owned if entry.shard.is_primary(SUMMED_AXES)]
    values = sum(entry.tensor.nbytes for entry in written)
    graphs = _graphs(costs, distributed, plan, peak)
    given_back = peak.total - peak.kept * (graphs > 0)  # graphs keep what forwards leave
    release_free_memory()
    mine = MemoryForecast(
        program=held_memory_mb(state.device) - 1e-6 * (weights + gradients + held_state_bytes(optimizer)),
        weights=1e-6 * (weights + buffers),
        gradients=1e-6 * gradients,
        optimizer=1e-6 * moments,
        kept=1e-6 * peak.kept,
        working=1e-6 * peak.working,
        messages=1e-6 * peak.messages,
        samples=1e-6 * _sample_bytes(config, distributed, plan.micro_batches // window_count(config), on_host),
        gathered=1e-6 * gathered,
        snapshot=1e-6 * (values + values * (averages > 0) + _moments(written, config)) * snapshots,
        graphs=1e-6 * graphs,
        update=1e-6 * max(0, working_bytes(owned, config.optimizer) - gathered - given_back),
    )
    of_ranks = [mine] * state.world.size
    if state.world.size > 1:
        dist.all_gather_object(of_ranks, mine, group=state.world.handle)
    return of_ranks


def step_peak(
    config: PretrainConfig, distributed: DistributedModel, plan: PipelinePlan, state: ParallelState
) -> Moment:
    """Moment of a usual step at which this rank will need most, without graphs. Collective over the ranks that share a
    micro-batch."""
    return _peak(_costs(config, distributed, plan, state), distributed, plan)


def _costs(
    config: PretrainConfig, distributed: DistributedModel, plan: PipelinePlan, state: ParallelState
) -> PipelineCosts:
    """Costs of the plan, or of the layers' memory alone."""
    return plan.costs or count_memory(
        distributed.model,
        distributed.context.largest_share(config.training.micro_batch_size),
        distributed.context,
        state.device,
        wire_options(config.parallel),
        plan.schedules.units is not None,
    )


def _agreed_costs(
    config: PretrainConfig, distributed: DistributedModel, plan: PipelinePlan, state: ParallelState
) -> PipelineCosts | str:
    """The same, or on every rank why a layer of one cannot be tried out. Collective over the world."""
    found: PipelineCosts | str
    try:
        found = _costs(config, distributed, plan, state)
    except Exception as error:
        if state.tensor.size > 1 or state.context.size > 1:  # others wait for this rank in the middle of a layer
            raise
        found = f"{type(error).__name__}: {error}"
    reasons: list[str] = [found if isinstance(found, str) else ""]
    if state.world.size > 1:
        reasons *= state.world.size
        dist.all_gather_object(reasons, reasons[0], group=state.world.handle)
    return next(filter(None, reasons), found)


def _peak(costs: PipelineCosts, distributed: DistributedModel, plan: PipelinePlan) -> Moment:
    schedule = plan.schedules.training(plan.micro_batches)
    exchanged = [distributed.data_parallel.exchanged_bytes] * schedule.ranks
    return peak_moments(schedule, plan.executed_bounds, costs, exchanged)[distributed.state.pipeline.rank]


def _graphs(costs: PipelineCosts, distributed: DistributedModel, plan: PipelinePlan, peak: Moment) -> int:
    """Bytes beside that peak; nothing where no layer has graphs."""
    if all(chunk.graphs is None for chunk in distributed.chunks.values()):
        return 0
    schedule, rank = plan.schedules.training(plan.micro_batches), distributed.state.pipeline.rank
    return max(0, graphs_bytes(schedule, rank, plan.executed_bounds, costs) - peak.kept)


def _moments(entries: Iterable[ShardedTensor], config: PretrainConfig) -> int:
    trained = (entry.tensor for entry in entries if entry.is_parameter and entry.tensor.requires_grad)
    return state_bytes(trained, config.optimizer)


def _sample_bytes(config: PretrainConfig, distributed: DistributedModel, micro_batches: int, on_host: bool) -> int:
    """Stages behind the first see no samples."""
    if not distributed.takes_images:
        return 0
    context = distributed.context
    share = context.largest_share(config.training.micro_batch_size)
    return sample_bytes(config, context.dtype.itemsize, micro_batches, share, on_host)


def announce(forecasts: Sequence[MemoryForecast], reporter: Reporter) -> None:
    """Before the first step: what the ranks will need, the largest in detail; nothing without forecasts."""
    if not forecasts:
        return
    rank = max(range(len(forecasts)), key=lambda each: forecasts[each].total)
    others = f", the largest of {len(forecasts)}" if len(forecasts) > 1 else ""
    reporter.line(f"memory predicted for rank {rank}{others}: {forecasts[rank]}")
    reporter.entry("memory_predicted", {"mb": [{**asdict(each), "total": each.total} for each in forecasts]})


def compare(forecasts: Sequence[MemoryForecast], state: ParallelState, reporter: Reporter) -> None:
    """At the end: the measured peak of each rank, beside its prediction if there is one. Collective over the world."""
    peaks = gather_peak_memory_mb(state.device, state.world.handle)
    rank = max(range(len(peaks)), key=peaks.__getitem__)
    reporter.entry("memory", {"peak_mb": peaks, "predicted_mb": [each.total for each in forecasts]})
    if not forecasts:
        reporter.line(f"memory of rank {rank}: peak {peaks[rank]:.0f} MB")
        return
    shares = [peak / each.total for peak, each in zip(peaks, forecasts, strict=True)]
    among = f" ({min(shares):.2f} to {max(shares):.2f} over all ranks)" if len(shares) > 1 else ""
    reporter.line(
        f"memory of rank {rank}: peak {peaks[rank]:.0f} MB, predicted {forecasts[rank].total:.0f} MB, measured / "
        f"predicted {shares[rank]:.2f}{among}; the difference is what the allocator keeps and what was not foreseen"
    )
