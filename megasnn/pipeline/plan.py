"""How a model goes through a pipeline: which layers are a chunk, where it lives, and who does what when."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

from megasnn.comm.agreement import decided_by_first
from megasnn.layers.context import BuildContext
from megasnn.models.description import ModelDescription
from megasnn.parallel_state import ParallelState
from megasnn.pipeline.costs import PipelineCosts
from megasnn.pipeline.measured import agreed_costs
from megasnn.pipeline.order import Compared, ExchangedOf, PipelineRequest, chunk_costs, decide_order
from megasnn.pipeline.owned_rows_memory import exchanged_with_owners
from megasnn.pipeline.p2p import WireOptions
from megasnn.pipeline.peaks import Travelling, step_peaks
from megasnn.pipeline.shared_weights import shared_weights
from megasnn.schedule import ChunkCost, Kind, SchedulePlan, Simulation, simulate
from megasnn.schedule.evaluate import Forecast, forecast
from megasnn.schedule.named import looks_at_costs
from megasnn.schedule.refine import NEVER
from megasnn.schedule.weights import SharedWeights

_NAMED_SHOWN = 3  # of the named schedules, the fastest ones


@dataclass(frozen=True)
class PipelinePlan:
    """The answer, the same on every rank.

    Attributes:
        bounds: the layers of each chunk.
        schedules: for any number of micro-batches; carries those decided on for the request's numbers.
        micro_batches: of a usual step.
        costs: measured; None where nobody needed them.
        named: what the named schedules would take, each on its own cut; empty without costs.
        compared: the orders that were looked at for a budget, or for weights that replicas share.
        memory_budget: as it was asked for.
        weight_ranks: how many replicas share one copy of the weights.
        exchanged: bytes that travel to and from those who own rows, on each pipeline rank; empty where rows have no
            owners, or there is no budget.
    """

    bounds: tuple[range, ...]
    schedules: SchedulePlan
    micro_batches: int
    costs: PipelineCosts | None = None
    named: tuple[Forecast, ...] = ()
    compared: tuple[Compared, ...] = ()
    memory_budget: float | None = None
    weight_ranks: int = 1
    exchanged: tuple[Travelling, ...] = ()

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
        lines.append("  named ones: " + (", ".join(named) or "none keeps the limit"))
        if self.compared:
            whole = [f"{each.name} {_whole(each)}" for each in self.compared]
            lines.append(f"  compared {self._with()}: {', '.join(whole)}; no other one is faster")
        return lines

    def _with(self) -> str:
        """What orders were compared with."""
        budget = "" if self.memory_budget is None else f"within --memory-budget {1e-6 * self.memory_budget:g}"
        gathers = "" if self.weight_ranks == 1 else f"with --weight-parallel-size {self.weight_ranks}"
        return " ".join(filter(None, (budget, gathers)))

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
        if self.schedules.recompute == NEVER and self.memory_budget is None:
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
        """`peak_bytes`, and tensors in transfer between stages and, with a budget, to and from those who own rows."""
        assert self.costs is not None, "the memory of layers was not measured"
        schedule = self.schedules.training(micro_batches)
        peaks = step_peaks(schedule, self.executed_bounds, self.costs, self.exchanged)
        return [peak.total for peak in peaks]

    def _chunk_costs(self) -> list[ChunkCost]:
        assert self.costs is not None
        return chunk_costs(self.schedules, self.bounds, self.costs, self.weight_ranks)


def _in_short(each: Forecast) -> str:
    return f"{1e3 * each.makespan:.1f} ms ({each.idle_share:.1%} bubble)"


def _whole(each: Compared) -> str:
    whole = "not possible" if each.whole is None else f"{1e3 * each.whole:.1f} ms"
    return f"{whole} ({1e3 * each.alone:.1f} ms without)"


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
        costs = agreed_costs(model, request.micro_batch_size, context, state, wires, request.repeats)
    request = replace(request, bounds=bounds)
    shares = None if context.weight.size == 1 else partial(_shared, model, context, request)
    exchanged_of: ExchangedOf | None = None
    if request.memory_budget is not None and request.rows_have_owners and state.copies.size > 1 and shares is None:
        exchanged_of = partial(exchanged_with_owners, model, context, state.copies, state.device)
    ranks = context.weight.size
    order = decided_by_first(
        state.world, lambda: decide_order(request, stages, len(model.layers), costs, shares, ranks, exchanged_of)
    )
    exchanged = () if exchanged_of is None else tuple(exchanged_of(order.bounds, order.schedules.placement))
    return PipelinePlan(
        order.bounds,
        order.schedules,
        request.micro_batches[0],
        costs,
        order.named,
        order.compared,
        request.memory_budget,
        ranks,
        exchanged,
    )


def _shared(
    model: ModelDescription, context: BuildContext, request: PipelineRequest, units: Sequence[range]
) -> SharedWeights:
    return shared_weights(model, units, context, request.weight_limit, request.scatters)
