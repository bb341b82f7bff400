"""The search for the best schedule: the likely ones first, and none further than until it cannot win any more."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

from megasnn.schedule.actions import Kind, Schedule
from megasnn.schedule.costs import ChunkCost
from megasnn.schedule.evaluate import Candidate, of_named, of_rows
from megasnn.schedule.memory import stage_shares
from megasnn.schedule.named import SCHEDULES, CostsOf, equal_costs, filled_recipes, keep_limit, possible_chunks
from megasnn.schedule.passes import Boundaries
from megasnn.schedule.streams import Ticks
from megasnn.schedule.validate import ROUNDING
from megasnn.schedule.zero_bubble import Recipe, half_limit, min_limit

GAPS = (1.0, 0.5)  # parts of a weight gradient's time that a rank waits at least before it takes one in
EQUAL = 1 + 1e-9  # makespans that differ by less are the same


def find_best(
    stages: int,
    micro_batches: int,
    costs_of: CostsOf,
    memory_limit: float | None = None,
    chunks_per_rank: int | None = None,
    placement: tuple[int, ...] | None = None,
) -> Schedule:
    """The schedule of least simulated makespan that keeps the limit; of equally fast ones one that holds least.

    Tried are all named ones, filled by these costs and by equal ones, 1F1B's order with every smaller memory,
    and the V schedules with several memory limits and shorter gaps filled. It is never slower than a named one
    that fits, and with one chunk a rank there is always one that holds a single micro-batch. With a `placement`,
    only schedules on it are looked at.

    Raises ValueError when none keeps the limit.
    """
    counts = (1, 2) if chunks_per_rank is None else (chunks_per_rank,)
    search = _Search(micro_batches, costs_of, memory_limit)
    recipes = [each for each in _recipes(stages, micro_batches, counts) if placement in (None, each.placement)]
    for recipe in recipes:
        search.try_recipe(recipe)
    for name, count in ((name, count) for count in counts for name in SCHEDULES if possible_chunks(name, count)):
        if placement in (None, SCHEDULES[name].placement(stages, count)):
            search.try_named(name, stages, count)
    if search.best is None:
        tightest = min((recipe.limit for recipe in recipes), default=0)
        for recipe in recipes:
            if recipe.limit == tightest:
                search.note_memory(recipe)
        raise ValueError(
            f"--pipeline-memory-limit {memory_limit:g}: no schedule for {stages} stages and {micro_batches} "
            f"micro-batches holds so little; the least found is {search.least_held:g}"
        )
    schedule = search.best.schedule()
    keep_limit(schedule, costs_of, memory_limit)
    return schedule


def _recipes(stages: int, micro_batches: int, counts: tuple[int, ...]) -> Iterator[Recipe]:
    """All of them, those that are likely to be fast first: what they take is a bound for the others."""
    named = filled_recipes(stages)
    if 2 in counts:
        fastest, *others = [recipe for recipe in named if recipe.v]
        yield fastest
        for gap in GAPS:
            for limit in (stages + stages // 2, 2 * stages):
                yield Recipe(f"V within {limit}", stages, limit, v=True, gap=gap)
        yield from others
        for limit in sorted({stages, half_limit(stages), min_limit(stages)}, reverse=True):
            yield Recipe(f"V within {limit}", stages, limit, v=True, gap=GAPS[1])
    if 1 in counts:
        yield from (recipe for recipe in named if not recipe.v)
        for limit in range(min(stages - 1, micro_batches), 0, -1):  # more are not there to be held
            yield Recipe(f"zb1p within {limit}", stages, limit, most=limit - 1)


class _Search:
    """Keeps the best candidate of those that were tried.

    Attributes:
        best: of those that keep the limit. least_held: by any that was looked at.
    """

    def __init__(self, micro_batches: int, costs_of: CostsOf, memory_limit: float | None) -> None:
        self._micro_batches, self._costs_of, self._limit = micro_batches, costs_of, memory_limit
        self._seen: set[Recipe] = set()
        self.best: Candidate | None = None
        self.least_held = math.inf

    def try_recipe(self, recipe: Recipe) -> None:
        """Fills by the costs, for as long as that can still win."""
        costs, count = self._costs_of(recipe.placement), self._micro_batches
        unit = _unit_of_activations(recipe.placement, costs)
        if self._limit is not None and unit is not None:
            recipe = _within(recipe, self._limit / unit, count)
        known = replace(recipe, name="")
        ticks = Ticks.of(recipe.placement, costs, count)
        longest = math.inf
        if self.best is not None:
            # What may hold as much as the best one must be faster.
            as_much = unit is not None and min(recipe.limit, count) * unit >= self.best.held
            longest = self.best.makespan * (1 / EQUAL if as_much else EQUAL)
        least = max(least_time(recipe.placement, costs, count, whole=False), _time_of_rounds(recipe, costs, count))
        if known in self._seen or least > longest:
            return
        self._seen.add(known)
        filled = recipe.fill(ticks, count, (longest / ticks.unit, math.inf))
        if filled is not None:
            self._consider(of_rows(recipe.name, recipe.placement, count, filled.rows, costs))

    def try_named(self, name: str, stages: int, count: int) -> None:
        """A schedule that does not look at the costs, or as it would be if all were equal."""
        placement = SCHEDULES[name].placement(stages, count)
        costs = self._costs_of(placement)
        looks_at_costs = SCHEDULES[name].looks_at_costs
        if looks_at_costs and costs == equal_costs(stages)(placement):
            return  # it is among the recipes
        least = least_time(placement, costs, self._micro_batches, whole=not looks_at_costs)
        if self.best is None or least <= self.best.makespan * EQUAL:
            self._consider(of_named(name, stages, self._micro_batches, count, self._costs_of, equal_costs(stages)))

    def note_memory(self, recipe: Recipe) -> None:
        """What it would hold, for a refusal."""
        costs, count = self._costs_of(recipe.placement), self._micro_batches
        filled = recipe.fill(Ticks.of(recipe.placement, costs, count), count)
        if filled is not None:
            held = of_rows(recipe.name, recipe.placement, count, filled.rows, costs).held
            self.least_held = min(self.least_held, held)

    def _consider(self, found: Candidate) -> None:
        self.least_held = min(self.least_held, found.held)
        if self._limit is not None and found.held > self._limit + ROUNDING:
            return
        best = self.best
        if best is None or found.makespan * EQUAL < best.makespan:
            self.best = found
        elif found.makespan <= best.makespan * EQUAL and _preference(found) < _preference(best):
            self.best = found


def _preference(found: Candidate) -> tuple[float, int, bool]:
    """Among equally fast ones: what holds less, in fewer chunks, with backwards in one part."""
    return found.held, len(found.placement), not isinstance(found.order, Schedule)


def _unit_of_activations(placement: Sequence[int], costs: Sequence[ChunkCost]) -> float | None:
    """A whole stage's activations of one micro-batch in the unit of the costs; None where stages differ."""
    shares = stage_shares(placement)
    units = {round(cost.activation / share, 9) for cost, share in zip(costs, shares, strict=True)}
    return units.pop() if len(units) == 1 and units != {0.0} else None


def _within(recipe: Recipe, limit: float, micro_batches: int) -> Recipe:
    """The recipe within a smaller limit; the same one where that does not bind."""
    if min(recipe.limit, micro_batches) <= limit + ROUNDING:
        return recipe
    return replace(recipe, name=f"V within {limit:g}" if recipe.v else f"zb1p within {limit:g}", limit=limit)


def _time_of_rounds(recipe: Recipe, costs: Sequence[ChunkCost], micro_batches: int) -> float:
    """A bound: with one chunk a rank and room for n micro-batches, each n go through the whole pipeline and back."""
    if recipe.v:
        return 0.0
    ways = [cost.way(forward) for cost in costs[:-1] for forward in (True, False)]
    moving = sum(way.send + way.time + way.receive for way in ways)
    computing = sum(cost.time(Kind.FORWARD) + cost.time(Kind.INPUT_GRADIENT) for cost in costs)
    there_and_back = moving + computing + costs[0].time(Kind.WEIGHT_GRADIENT)
    return math.ceil(micro_batches / max(1, math.floor(recipe.limit + ROUNDING))) * there_and_back


def least_time(placement: Sequence[int], costs: Sequence[ChunkCost], micro_batches: int, whole: bool) -> float:
    """A bound for any schedule on a placement: a rank's first input has to come, and all its work to be done.

    Args:
        whole: backwards are not split; then the last one on a rank has to go on to the first chunk.
    """
    boundaries = Boundaries.of(tuple(placement))
    work, around = [0.0] * (max(placement) + 1), [0.0] * (max(placement) + 1)
    seen: set[int] = set()
    before = 0.0  # seconds on the way to a chunk, and back where that counts
    arriving = 0.0  # the part of them that the chunk's own rank works
    for chunk, (rank, cost) in enumerate(zip(placement, costs, strict=True)):
        if rank not in seen:
            seen.add(rank)
            around[rank] = before - arriving
        backward = cost.backward if whole else cost.split_backward
        work[rank] += cost.forward + backward
        before += cost.forward + whole * backward
        if boundaries.after[chunk]:
            out, back = cost.way(True), cost.way(False)
            arriving = out.receive + whole * back.send
            before += out.send + out.time + whole * (back.time + back.receive) + arriving
            work[rank] += out.send + back.receive
            work[placement[chunk + 1]] += out.receive + back.send
    return max(a + micro_batches * b for a, b in zip(around, work, strict=True))
