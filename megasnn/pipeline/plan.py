"""How a model goes through a pipeline: which layers are a chunk, where it lives, and who does what when."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial

from megasnn.comm.agreement import decided_by_first
from megasnn.layers.context import BuildContext
from megasnn.models.description import ModelDescription
from megasnn.parallel_state import ParallelState
from megasnn.pipeline.costs import PipelineCosts
from megasnn.pipeline.kept_costs import kept_costs
from megasnn.pipeline.measured import agreed_costs
from megasnn.pipeline.memory import step_peaks
from megasnn.pipeline.p2p import WireOptions
from megasnn.schedule import ChunkCost, Kind, SchedulePlan, Simulation, plan_schedule, simulate
from megasnn.schedule.budget import within_budget
from megasnn.schedule.evaluate import Forecast, forecast, forecasts_of_named
from megasnn.schedule.named import looks_at_costs
from megasnn.schedule.partition import placed_bounds
from megasnn.schedule.refine import NEVER

_NAMED_SHOWN = 3  # of the named schedules, the fastest ones


@dataclass(frozen=True)
class PipelineRequest:
    """What is asked for.

    Attributes:
        schedule: a name, or "auto".
        chunks_per_rank: None: auto may choose.
        memory_limit: activations that a rank may hold, in whole stages' micro-batches.
        bounds: the layers of each chunk; None: balanced by the measured costs.
        micro_batch_size: samples in each micro-batch.
        micro_batches: the numbers of them that replicas have in a step, the largest first.
        predicts: whether costs are wanted even where the plan would not need any.
        recompute: a name in `RECOMPUTE`.
        memory_budget: bytes that a step may need on a rank (`StepPeak.total`); forwards are computed again to keep it.
        offloads: whether what they are computed from is moved to the host's memory meanwhile.
        costs_kept_as: under which key measured costs are kept for other runs; None: measured in each.
    """

    schedule: str
    chunks_per_rank: int | None
    memory_limit: float | None
    bounds: tuple[range, ...] | None
    micro_batch_size: int
    micro_batches: tuple[int, ...]
    predicts: bool = False
    recompute: str = NEVER
    memory_budget: float | None = None
    offloads: bool = False
    costs_kept_as: tuple[str, ...] | None = None

    @property
    def repeats(self) -> bool:
        """Whether forwards may be computed again."""
        return self.recompute != NEVER or self.memory_budget is not None


@dataclass(frozen=True)
class PipelinePlan:
    """The answer, the same on every rank.

    Attributes:
        bounds: the layers of each chunk.
        schedules: for any number of micro-batches; carries those decided on for the request's numbers.
        micro_batches: of a usual step.
        costs: measured; None where nobody needed them.
        named: what the named schedules would take, each on its own cut; empty without costs.
        memory_budget: as it was asked for.
    """

    bounds: tuple[range, ...]
    schedules: SchedulePlan
    micro_batches: int
    costs: PipelineCosts | None = None
    named: tuple[Forecast, ...] = ()
    memory_budget: float | None = None

    @property
    def executed_bounds(self) -> list[range]:
        """The layers of each unit, which is what a schedule that is executed calls a chunk."""
        return self.schedules.unit_bounds(self.bounds)

    def simulation(self, micro_batches: int) -> Simulation | None:
        """What a step of so many micro-batches should take, in seconds; None without costs."""
        if self.costs is None:
            return None
        return simulate(self.schedules.training(micro_batches), self._chunk_costs(), self.schedules.wholes)

    def forecast(self, micro_batches: int) -> Forecast | None:
        """`simulation` in short."""
        if self.costs is None:
            return None
        return forecast(self.schedules.training(micro_batches), self._chunk_costs(), self.schedules.wholes)

    def peak_bytes(self, micro_batches: int) -> list[int]:
        """The most that a step needs at once on each pipeline rank, above weights, gradients and optimizer state.

        Activations, and what the computation under way needs beside them; tensors in transfer are not counted.
        Raises ValueError without costs.
        """
        if self.costs is None:
            raise ValueError("the memory of layers was not measured")
        peaks = step_peaks(self.schedules.training(micro_batches), self.executed_bounds, self.costs)
        return [peak.kept + peak.working for peak in peaks]

    def describe(self, asked: str) -> list[str]:
        """Lines that say what was chosen, and what else there was; none without costs.

        Args:
            asked: the name of the schedule that was asked for.
        """
        chosen = self.forecast(self.micro_batches)
        if chosen is None:
            return []
        lines = [
            f"--pipeline-schedule {asked}: {chosen.name}, predicted for {self.micro_batches} micro-batches "
            f"{_in_short(chosen)}, at most {chosen.activations:g} micro-batches' activations on a rank"
        ]
        named = [f"{each.name} {_in_short(each)}" for each in self.named[:_NAMED_SHOWN]]
        if len(self.named) > _NAMED_SHOWN:
            named.append(f"{len(self.named) - _NAMED_SHOWN} slower ones")
        return [*lines, "  named ones: " + (", ".join(named) or "none keeps the limit")]

    def repeated(self) -> list[dict[int, list[int]]]:
        """Of each pipeline rank: the micro-batches of a usual step whose forwards are computed again, by unit."""
        found: list[dict[int, list[int]]] = []
        for row in self.schedules.training(self.micro_batches).actions:
            of_rank: dict[int, list[int]] = {}
            for unit, kind, m in row:
                if kind is Kind.RECOMPUTE and m is not None:
                    of_rank.setdefault(unit, []).append(m)
            found.append(dict(sorted(of_rank.items())))
        return found

    def describe_recompute(self) -> list[str]:
        """A line that says how many forwards are computed again, and with a budget, what that comes to."""
        if self.schedules.units is None and self.memory_budget is None:
            return []
        repeated, layers = self.repeated(), sum(map(len, self.bounds))
        count = sum(len(each) for of_rank in repeated for each in of_rank.values())
        what = f"{count} of a step's {layers * self.micro_batches} forwards of layers are computed again"
        if self.memory_budget is None or self.costs is None:
            return [f"--recompute {self.schedules.recompute}: {what}"]
        costs = self._chunk_costs()
        seconds = [sum(len(each) * costs[u].time(Kind.RECOMPUTE) for u, each in of.items()) for of in repeated]
        peaks = ", ".join(f"{1e-6 * each:.0f}" for each in self.step_bytes(self.micro_batches))
        return [
            f"--memory-budget {1e-6 * self.memory_budget:g}: {what}, {1e3 * max(seconds):.0f} ms on the rank that does "
            f"most; predicted for a step, above weights, gradients and optimizer state: {peaks} MB"
        ]

    def step_bytes(self, micro_batches: int) -> list[int]:
        """`peak_bytes`, and tensors in transfer."""
        assert self.costs is not None, "the memory of layers was not measured"
        peaks = step_peaks(self.schedules.training(micro_batches), self.executed_bounds, self.costs)
        return [peak.total for peak in peaks]

    def _chunk_costs(self) -> list[ChunkCost]:
        assert self.costs is not None
        return self.costs.of_chunks(self.executed_bounds, self.schedules.executed_placement)


def _in_short(each: Forecast) -> str:
    return f"{1e3 * each.makespan:.1f} ms ({each.idle_share:.1%} bubble)"


def plan_pipeline(
    model: ModelDescription,
    request: PipelineRequest,
    context: BuildContext,
    state: ParallelState,
    wires: WireOptions,
    costs: PipelineCosts | None = None,
) -> PipelinePlan:
    """Measures where that is needed, on all ranks, and lets the first one decide. Collective over the world.

    Args:
        costs: measured before, the same on every rank.
    Raises:
        ValueError: on every rank, what the schedule cannot place or a memory limit that it cannot keep.
    """
    stages, bounds = state.pipeline.size, request.bounds
    if bounds is None and stages == 1 and request.chunks_per_rank in (1, None):
        bounds = (range(len(model.layers)),)
    needs_costs = bounds is None or request.predicts or request.memory_budget is not None
    needs_costs |= stages > 1 and looks_at_costs(request.schedule)
    if needs_costs and costs is None:
        key, size = request.costs_kept_as, request.micro_batch_size
        measure = partial(agreed_costs, model, size, context, state, wires, request.repeats)
        costs = measure() if key is None else kept_costs(key, state.world, measure)
    request = replace(request, bounds=bounds)
    return decided_by_first(state.world, lambda: _decide(request, stages, len(model.layers), costs))


def _decide(request: PipelineRequest, stages: int, layers: int, costs: PipelineCosts | None) -> PipelinePlan:
    """The one search of a run, for every number of micro-batches that a replica may have."""
    usual = request.micro_batches[0]
    counts = _possible_counts(request, stages, layers)
    chunks_per_rank = counts[0] if len(counts) == 1 else request.chunks_per_rank
    cut = None if costs is None else _Cut(request, costs)
    costs_of = None if cut is None else cut.costs_of
    plan = plan_schedule(request.schedule, stages, chunks_per_rank, usual, costs_of, request.memory_limit)
    decided = tuple(plan.of_chunks(count) for count in dict.fromkeys(request.micro_batches))
    bounds = request.bounds if cut is None else cut.bounds_of(plan.placement)
    assert bounds is not None
    schedules = replace(plan, decided=decided)
    if request.recompute != NEVER:
        schedules = schedules.in_units(bounds, request.recompute)
    if request.memory_budget is not None and costs is not None:
        schedules = _within_budget(schedules, request, bounds, costs)
    schedules = replace(schedules, offloads=request.offloads and schedules.units is not None)
    if cut is None:
        return PipelinePlan(bounds, schedules, usual)
    compared = counts if request.bounds is not None else (1, 2)[: layers // stages]
    named = forecasts_of_named(stages, usual, cut.costs_of, request.memory_limit, compared)
    return PipelinePlan(bounds, schedules, usual, costs, tuple(named), request.memory_budget)


def _within_budget(
    plan: SchedulePlan, request: PipelineRequest, bounds: Sequence[range], costs: PipelineCosts
) -> SchedulePlan:
    """With forwards that are computed again, in units; as it is where none has to be. Raises ValueError for a budget
    that cannot be kept."""
    assert request.memory_budget is not None
    refined = plan.in_units(bounds, NEVER)
    units, placement = refined.unit_bounds(bounds), refined.executed_placement
    memory = costs.unit_memory(units, placement)
    chosen = {
        count: within_budget(refined.training(count), memory, request.memory_budget)
        for count in dict.fromkeys(request.micro_batches)
    }
    # A step of another length, at the end of an epoch, is shorter.
    return replace(refined, recompute="always", chosen=chosen) if any(chosen.values()) else plan


def _possible_counts(request: PipelineRequest, stages: int, layers: int) -> tuple[int, ...]:
    """The chunks that each rank may have."""
    if request.bounds is not None:
        return (len(request.bounds) // stages,)
    if request.chunks_per_rank is not None:
        return (request.chunks_per_rank,)
    return (1,) if 2 * stages > layers else (1, 2)


class _Cut:
    """A model's cut for any placement, and what it makes of the layers' costs."""

    def __init__(self, request: PipelineRequest, costs: PipelineCosts) -> None:
        self._request, self._costs = request, costs
        self.bounds_of = lru_cache(maxsize=None)(self._bounds_of)
        self.costs_of = lru_cache(maxsize=None)(self._costs_of)

    def _bounds_of(self, placement: tuple[int, ...]) -> tuple[range, ...]:
        if self._request.bounds is not None:
            return self._request.bounds
        return tuple(placed_bounds([layer.seconds for layer in self._costs.layers], placement))

    def _costs_of(self, placement: tuple[int, ...]) -> Sequence[ChunkCost]:
        costs = self._costs.of_chunks(self.bounds_of(placement), placement)
        if self._request.recompute == NEVER:
            return costs
        # A forward that is computed again comes right before its backward, as a part of that.
        return [
            replace(
                each,
                backward=each.backward + each.time(Kind.RECOMPUTE),
                input_gradient=each.time(Kind.INPUT_GRADIENT) + each.time(Kind.RECOMPUTE),
            )
            for each in costs
        ]
