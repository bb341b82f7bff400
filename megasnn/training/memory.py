"""Memory of every rank: predicted before the first step, compared with the measured peak at the end."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict

from megasnn.common.memory import peak_memory_mb, release_free_memory, resident_memory_mb
from megasnn.config import PretrainConfig
from megasnn.engine import Engine
from megasnn.engine.model import DistributedModel
from megasnn.optim.build import resident_state_bytes, state_bytes, working_bytes
from megasnn.parallel.agreement import gather
from megasnn.parallel.sharding import ShardedTensor
from megasnn.parallel_state import ParallelState
from megasnn.pipeline.cost_model import PipelineCosts
from megasnn.pipeline.peak_memory import Moment, peak_moments
from megasnn.pipeline.plan import PipelinePlan
from megasnn.pipeline.profile_layers import count_memory
from megasnn.planner.memory import MemoryForecast, sample_bytes
from megasnn.telemetry.reporter import Reporter


def forecast_memory(config: PretrainConfig, engine: Engine, reporter: Reporter) -> list[MemoryForecast]:
    """Forecasts of all ranks, in their order; empty if a layer cannot be tried out. Collective.

    Counts the layers' memory unless the plan has (`megasnn.pipeline.profile_layers`).
    """
    distributed, state = engine.distributed, engine.state
    problem = ""
    costs = None
    try:
        costs = costs_of_run(config, distributed, engine.plan)
    except Exception as error:
        # Ranks that share layers wait for this one inside a layer: only an error ends them.
        if state.tp.size > 1 or state.cp.size > 1:
            raise
        problem = f"{type(error).__name__}: {error}"
    forecast = None if costs is None else _forecast(config, engine, costs)
    of_ranks = gather(state.world.handle, (problem, forecast))
    problems = [text for text, _ in of_ranks if text]
    if problems:
        reporter.line(f"memory is not predicted: {problems[0]}")
        return []
    if any(chunk.graphs is not None for chunk in distributed.chunks.values()):
        reporter.line("memory is predicted without CUDA graphs, which take more")
    return [found for _, found in of_ranks if found is not None]


def _forecast(config: PretrainConfig, engine: Engine, costs: PipelineCosts) -> MemoryForecast:
    """Forecast of this rank."""
    distributed = engine.distributed
    plan = engine.plan
    state = engine.state
    owned = distributed.owned
    gradients = distributed.gradient_buckets.resident_bytes
    on_host = state.device.type == "cpu"  # on a GPU, its memory is predicted: copies on the host are not in it
    peak = peak_of(costs, distributed, plan)
    weights, averages = _weight_bytes(config, distributed)
    gathered, buffers = 0, 0
    if plan.schedules.weights is not None:
        schedule = plan.schedules.training(plan.micro_batches)
        gathered, buffers = plan.schedules.weights.gathered_and_buffers(schedule, state.pp.rank)
    snapshot = 0
    if on_host and config.checkpoint.async_save:
        written = [entry for entry in owned if entry.shard.is_primary()]
        values = sum(entry.tensor.nbytes for entry in written)
        snapshot = values + _state_bytes(written, config)
        if averages:
            snapshot += values
    samples = 0
    if distributed.takes_images:
        size = config.training.micro_batch_size
        share = size if config.data.mixes else distributed.context.largest_share(size)
        batches = plan.micro_batches // config.windows
        samples = sample_bytes(config, distributed.context.numerics.dtype.itemsize, batches, share, on_host)
    release_free_memory()
    resident = weights + averages + gradients + resident_state_bytes(engine.optimizer)
    return MemoryForecast(
        program=resident_memory_mb(state.device) - 1e-6 * resident,
        weights=1e-6 * (weights + averages + buffers),
        gradients=1e-6 * gradients,
        optimizer=1e-6 * _state_bytes(owned, config),
        kept=1e-6 * peak.stashed,
        working=1e-6 * peak.working,
        messages=1e-6 * peak.messages,
        samples=1e-6 * samples,
        gathered=1e-6 * gathered,
        snapshot=1e-6 * snapshot,
        update=1e-6 * max(0, working_bytes(owned, config.optimizer) - gathered - peak.total),
    )


def _weight_bytes(config: PretrainConfig, distributed: DistributedModel) -> tuple[int, int]:
    """Bytes of the tensors of this rank's chunks, and of their moving average."""
    # Copies of a chunk's own tensors share its memory: each address counts once.
    by_address = {entry.tensor.data_ptr(): entry.tensor.nbytes for entry in (*distributed.copies, *distributed.tensors)}
    averages = 0
    if config.optimizer.ema_decay:
        averages = sum(entry.tensor.nbytes for entry in distributed.owned)
    return sum(by_address.values()), averages


def costs_of_run(config: PretrainConfig, distributed: DistributedModel, plan: PipelinePlan) -> PipelineCosts:
    """Costs that the plan was made with; otherwise the layers' memory alone, counted now."""
    return plan.costs or count_memory(
        distributed.description,
        distributed.context.largest_share(config.training.micro_batch_size),
        distributed.context,
        distributed.state.device,
    )


def peak_of(costs: PipelineCosts, distributed: DistributedModel, plan: PipelinePlan) -> Moment:
    """Moment of a training step when this rank's activations and messages take most memory."""
    schedule = plan.schedules.training(plan.micro_batches)
    exchanged = [distributed.gradient_buckets.exchanged_bytes] * schedule.ranks
    return peak_moments(schedule, plan.segment_bounds, costs, exchanged)[distributed.state.pp.rank]


def _state_bytes(entries: Iterable[ShardedTensor], config: PretrainConfig) -> int:
    trained = (entry.tensor for entry in entries if entry.is_parameter and entry.tensor.requires_grad)
    return state_bytes(trained, config.optimizer)


def announce(forecasts: Sequence[MemoryForecast], reporter: Reporter) -> None:
    """Logs the largest forecast in detail before the first step."""
    if not forecasts:
        return
    rank = max(range(len(forecasts)), key=lambda each: forecasts[each].total)
    others = f", the largest of {len(forecasts)}" if len(forecasts) > 1 else ""
    reporter.line(f"memory predicted for rank {rank}{others}: {forecasts[rank]}")
    reporter.entry("memory_predicted", {"mb": [{**asdict(each), "total": each.total} for each in forecasts]})


def compare(forecasts: Sequence[MemoryForecast], state: ParallelState, reporter: Reporter) -> None:
    """Logs the measured peaks of all ranks at the end, beside their forecasts. Collective."""
    peaks = gather(state.world.handle, peak_memory_mb(state.device))
    rank = max(range(len(peaks)), key=peaks.__getitem__)
    reporter.entry("memory", {"peak_mb": peaks, "predicted_mb": [each.total for each in forecasts]})
    if not forecasts:
        reporter.line(f"memory of rank {rank}: peak {peaks[rank]:.0f} MB")
        return
    predicted = forecasts[rank].total
    reporter.line(
        f"memory of rank {rank}: peak {peaks[rank]:.0f} MB, predicted {predicted:.0f} MB, measured / predicted "
        f"{peaks[rank] / predicted:.2f}; the difference is what the allocator keeps and what was not foreseen"
    )
