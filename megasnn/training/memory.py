"""Every rank's memory: predicted before the first step, and compared with the measured peak at the end."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict

from megasnn.common.memory import peak_memory_mb, release_free_memory, resident_memory_mb
from megasnn.config import PretrainConfig
from megasnn.engine import Engine
from megasnn.engine.model import DistributedModel
from megasnn.optim.build import resident_state_bytes
from megasnn.parallel.agreement import gather
from megasnn.parallel.sharding import ShardedTensor
from megasnn.parallel_state import ParallelState
from megasnn.pipeline.cost_model import PipelineCosts
from megasnn.pipeline.memory_forecast import MemoryForecast, StateBytes, forecast, optimizer_bytes, sample_bytes
from megasnn.pipeline.peak_memory import MB, Moment, peak_moments
from megasnn.pipeline.plan import PipelinePlan
from megasnn.pipeline.profile_layers import count_memory
from megasnn.telemetry.reporter import Reporter


def forecast_memory(config: PretrainConfig, engine: Engine, reporter: Reporter) -> list[MemoryForecast]:
    """All ranks' forecasts, on every rank; none where a layer's trial step fails. Collective.

    Counts layer memory where the plan has no costs; see `megasnn.pipeline.profile_layers`.
    """
    distributed = engine.distributed
    state = engine.state
    problem = ""
    mine = None
    try:
        costs = costs_of_run(config, distributed, engine.plan)
    except Exception as error:
        # Ranks that share layers wait for this one in the middle of a layer: only an error ends them.
        if state.tp.size > 1 or state.cp.size > 1:
            raise
        problem = f"{type(error).__name__}: {error}"
    else:
        mine = forecast_of_rank(config, engine, engine.plan, costs)
    of_ranks = gather(state.world.handle, (problem, mine))
    for text, _ in of_ranks:
        if text:
            reporter.line(f"memory is not predicted: {text}")
            return []
    return [forecast for _, forecast in of_ranks if forecast is not None]


def forecast_of_rank(
    config: PretrainConfig, engine: Engine, plan: PipelinePlan, costs: PipelineCosts
) -> MemoryForecast:
    """This rank's forecast, for an Engine's tensors with a plan that may have another number of micro-batches."""
    distributed = engine.distributed
    device = engine.state.device
    on_host = device.type == "cpu"
    states = states_of_run(config, distributed)
    peak = peak_of(costs, distributed, plan)
    snapshot = 0
    if on_host and config.checkpoint.async_save:
        # With a GPU the copy is in host memory, which is not predicted.
        snapshot = _snapshot_bytes(config, distributed)
    # Stages after the first read none.
    samples = 0
    if distributed.takes_inputs:
        size = config.training.micro_batch_size
        # A rank that mixes samples reads whole micro-batches, not its own part alone.
        if not config.data.mixes:
            size = distributed.context.largest_share(size)
        itemsize = distributed.context.numerics.dtype.itemsize
        samples = sample_bytes(config, itemsize, plan.micro_batches // config.windows, size, on_host)
    # Free memory that glibc keeps would count as the program's.
    release_free_memory()
    # A loaded optimizer state is resident already.
    tensors = states.weights + states.gradients + resident_state_bytes(engine.optimizer)
    program = MB * resident_memory_mb(device) - tensors
    return forecast(
        states,
        peak,
        plan.schedules.training(plan.micro_batches),
        engine.state.pp.rank,
        plan.schedules.weights,
        program=program,
        samples=samples,
        snapshot=snapshot,
    )


def costs_of_run(config: PretrainConfig, distributed: DistributedModel, plan: PipelinePlan) -> PipelineCosts:
    """The plan's costs, or layer memory alone."""
    return plan.costs or count_memory(
        distributed.description,
        distributed.context.largest_share(config.training.micro_batch_size),
        distributed.context,
        distributed.state.device,
    )


def peak_of(costs: PipelineCosts, distributed: DistributedModel, plan: PipelinePlan) -> Moment:
    """Moment in a step at which this rank needs most."""
    schedule = plan.schedules.training(plan.micro_batches)
    exchanged = [distributed.gradient_buckets.exchanged_bytes] * schedule.ranks
    has_graphs = any(chunk.graphs is not None for chunk in distributed.chunks.values())
    return peak_moments(schedule, plan.segment_bounds, costs, exchanged, has_graphs)[distributed.state.pp.rank]


def states_of_run(config: PretrainConfig, distributed: DistributedModel) -> StateBytes:
    """This rank's tensor bytes, with the optimizer's state after a step."""
    # Copies of a tied tensor within a chunk share its memory, and each has a gradient.
    resident = {entry.tensor.data_ptr(): entry.tensor.nbytes for entry in (*distributed.copies, *distributed.tensors)}
    weights = sum(resident.values())
    if config.optimizer.ema_decay:
        weights += sum(entry.tensor.nbytes for entry in distributed.owned)
    state, working = optimizer_bytes(_trained_bytes(distributed.owned), config.optimizer)
    return StateBytes(
        weights=weights,
        gradients=distributed.gradient_buckets.resident_bytes,
        optimizer=state,
        exchanged=distributed.gradient_buckets.exchanged_bytes,
        working=working,
    )


def _snapshot_bytes(config: PretrainConfig, distributed: DistributedModel) -> int:
    """All tensors that this rank writes to a checkpoint."""
    written = [entry for entry in distributed.owned if entry.shard.is_primary()]
    values = sum(entry.tensor.nbytes for entry in written)
    if config.optimizer.ema_decay:
        values *= 2
    state, _ = optimizer_bytes(_trained_bytes(written), config.optimizer)
    return values + state


def _trained_bytes(entries: Iterable[ShardedTensor]) -> list[int]:
    return [entry.tensor.nbytes for entry in entries if entry.is_parameter and entry.tensor.requires_grad]


def log_forecast(forecasts: Sequence[MemoryForecast], reporter: Reporter) -> None:
    """Logs the largest forecast in detail before the first step."""
    if not forecasts:
        return
    # The rank that needs most decides whether the run fits.
    rank = max(range(len(forecasts)), key=lambda each: forecasts[each].total)
    others = f", the largest of {len(forecasts)}" if len(forecasts) > 1 else ""
    reporter.line(f"memory predicted for rank {rank}{others}: {forecasts[rank]}")
    reporter.entry("memory_predicted", {"mb": [{**asdict(each), "total": each.total} for each in forecasts]})


def log_measured_peak(forecasts: Sequence[MemoryForecast], state: ParallelState, reporter: Reporter) -> None:
    """Logs each rank's measured peak at the end, beside any forecast. Collective."""
    peaks = gather(state.world.handle, peak_memory_mb(state.device))
    rank = max(range(len(peaks)), key=peaks.__getitem__)
    reporter.entry("memory", {"peak_mb": peaks, "predicted_mb": [each.total for each in forecasts]})
    if not forecasts:
        reporter.line(f"memory of rank {rank}: peak {peaks[rank]:.0f} MB")
        return
    predicted = forecasts[rank].total
    reporter.line(
        f"memory of rank {rank}: peak {peaks[rank]:.0f} MB, predicted {predicted:.0f} MB, measured / predicted "
        f"{peaks[rank] / predicted:.2f}; the difference is memory that the allocator keeps, or was not foreseen"
    )
