"""The schedules that have names, computing alone or complete: all that depends on a name is in `SCHEDULES`."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace

from megasnn.registry import Registry
from megasnn.schedule.actions import Schedule
from megasnn.schedule.basic import gpipe, interleaved, one_f_one_b
from megasnn.schedule.costs import ChunkCost, chunk_costs
from megasnn.schedule.memory import activations_held
from megasnn.schedule.partition import PLACEMENTS
from megasnn.schedule.passes import insert_gradient_sync, insert_transfers
from megasnn.schedule.streams import Ticks, as_schedule
from megasnn.schedule.validate import validate
from megasnn.schedule.zero_bubble import Recipe, half_limit, min_limit

CostsOf = Callable[[tuple[int, ...]], Sequence[ChunkCost]]  # placement -> cost of each chunk


@dataclass(frozen=True)
class FixedOrder:
    """A schedule whose order does not depend on costs, with backwards in one part.

    Attributes:
        summary: what it does, for --help.
        order: (stages, micro-batches, chunks on each rank) -> the schedule, computing alone.
        holds: with the same arguments, a bound for what the rank that holds most holds, in whole stages' micro-batches.
        chunks: on each rank when no number is given.
        any_chunks: it can place any other number, too; with fewer than `chunks` it is another schedule.
        forwards_first: whether all of them come before the first backward of a rank.
    """

    summary: str
    order: Callable[[int, int, int], Schedule]
    holds: Callable[[int, int, int], float] = lambda stages, micro_batches, chunks: 1
    chunks: int = 1
    any_chunks: bool = False
    forwards_first: bool = False
    looks_at_costs = False

    def placement(self, stages: int, chunks: int) -> tuple[int, ...]:
        """The pipeline rank of each chunk."""
        return self.order(stages, 1, chunks).placement


@dataclass(frozen=True)
class FilledOrder:
    """A zero-bubble schedule: weight gradients are put by the costs where a rank would wait.

    Attributes:
        summary: what it does, for --help.
        limit: stages -> activations that a rank may hold, in whole stages' micro-batches.
        v: whether it places two chunks on each rank as a V, instead of one.
        pace: as in `Recipe`.
    """

    summary: str
    limit: Callable[[int], float]
    v: bool = False
    pace: int = 1
    any_chunks = False
    looks_at_costs = True

    @property
    def chunks(self) -> int:
        return 2 if self.v else 1

    def placement(self, stages: int, chunks: int) -> tuple[int, ...]:
        """The pipeline rank of each chunk."""
        return PLACEMENTS["v" if self.v else "loop"](stages, chunks)

    def recipe(self, name: str, stages: int) -> Recipe:
        return Recipe(name, stages, self.limit(stages), v=self.v, pace=self.pace)

    def holds(self, stages: int, micro_batches: int, chunks: int) -> float:
        """Of one chunk a rank the warm-up. For a V, whose order is searched, what every schedule holds."""
        return 1 if self.v else self.pace * (stages - 1) + 1


AUTO = "auto"  # stands for the best that a search finds
SCHEDULES: Registry[FixedOrder | FilledOrder] = Registry(
    "--pipeline-schedule",
    {
        "gpipe": FixedOrder(
            "all forwards, then all backwards",
            lambda stages, micro_batches, chunks: gpipe(stages, micro_batches),
            lambda stages, micro_batches, chunks: micro_batches,
            forwards_first=True,
        ),
        "1f1b": FixedOrder(
            "one forward and one backward in turn",
            lambda stages, micro_batches, chunks: one_f_one_b(stages, micro_batches),
            lambda stages, micro_batches, chunks: stages,
        ),
        "interleaved": FixedOrder(
            "1f1b over several chunks on each rank",
            interleaved,
            lambda *sizes: max(activations_held(interleaved(*sizes), rank=0)),
            chunks=2,
            any_chunks=True,
        ),
        "zb1p": FilledOrder("1f1b's order and memory, a third of its bubble", lambda stages: stages),
        "zb2p": FilledOrder("no bubble, with twice that memory", lambda stages: 2 * stages, pace=2),
        "zbv": FilledOrder("two chunks a rank as a V, no bubble with 1f1b's memory", lambda stages: stages, v=True),
        "v-half": FilledOrder("a V with about half of that memory", half_limit, v=True),
        "v-min": FilledOrder("a V with about a third of it", min_limit, v=True),
    },
    also=(AUTO,),
)


def equal_costs(stages: int) -> CostsOf:
    """Forward, input gradient and weight gradient of every stage take one unit each, transfers none."""
    return per_stage([ChunkCost(1, 2)] * stages)


def per_stage(stages: Sequence[ChunkCost]) -> CostsOf:
    """Costs of whole stages; a chunk's are its share of them."""
    return lambda placement: chunk_costs(stages, placement)


def possible_chunks(name: str, chunks_per_rank: int) -> bool:
    """Whether a named schedule can place so many chunks on each rank."""
    named = SCHEDULES[name]
    return named.any_chunks or chunks_per_rank == named.chunks


def looks_at_costs(name: str) -> bool:
    """Whether the costs of the chunks make a difference to what a name, or the search, comes to."""
    return name == AUTO or SCHEDULES[name].looks_at_costs


def filled_recipes(stages: int) -> list[Recipe]:
    """Of the named schedules that are filled, in the order of the table."""
    filled = [(name, named) for name, named in SCHEDULES.items() if isinstance(named, FilledOrder)]
    return [named.recipe(name, stages) for name, named in filled]


def named_schedule(
    name: str, stages: int, micro_batches: int, chunks_per_rank: int | None, costs_of: CostsOf
) -> Schedule:
    """A named schedule, computing alone.

    Args:
        chunks_per_rank: the schedule's own number when not given.
        costs_of: the costs of each chunk, which decide where weight gradients go.
    """
    named = SCHEDULES[name]
    if isinstance(named, FixedOrder):
        chunks = named.chunks if chunks_per_rank is None else chunks_per_rank
        return replace(named.order(stages, micro_batches, chunks), name=name)
    recipe = named.recipe(name, stages)
    filled = recipe.fill(Ticks.of(recipe.placement, costs_of(recipe.placement), micro_batches), micro_batches)
    if filled is None:
        raise ValueError(f"--pipeline-schedule {name} cannot keep its memory on {stages} stages")
    return as_schedule(name, recipe.placement, micro_batches, filled.rows)


def least_held(name: str, stages: int, micro_batches: int, chunks_per_rank: int | None = None) -> float:
    """What a rank holds at least with a schedule, in whole stages' micro-batches, as far as its warm-up alone says.

    Exact for gpipe, 1f1b, interleaved and zb1p: the first rank holds the most. For those whose order is searched it is
    the one micro-batch that every schedule holds.
    """
    if name == AUTO:
        return min(1, micro_batches)
    named = SCHEDULES[name]
    return min(named.holds(stages, micro_batches, chunks_per_rank or named.chunks), micro_batches)


def what_it_is(name: str, stages: int, micro_batches: int) -> Hashable:
    """Named schedules of which this is the same are the same schedule, whatever the costs: few stages, or few
    micro-batches, leave some of them no choice."""
    named = SCHEDULES[name]
    if isinstance(named, FixedOrder):
        return name
    ahead = tuple(min(named.pace * behind, micro_batches) for behind in range(stages))
    return named.v, min(named.limit(stages), micro_batches), ahead


def complete(order: Schedule) -> Schedule:
    """With transfers and gradient sync."""
    return insert_gradient_sync(insert_transfers(order))


def keep_limit(schedule: Schedule, costs_of: CostsOf, memory_limit: float | None) -> None:
    """Validates a complete schedule. Raises ScheduleError where it is wrong, or holds more than the limit."""
    validate(schedule, memory_limit, [cost.activation for cost in costs_of(schedule.placement)])
