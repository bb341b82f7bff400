"""Named schedules: all that depends on a name is in `SCHEDULES`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from megasnn.registry import Registry
from megasnn.schedule.actions import Schedule
from megasnn.schedule.costs import ChunkCost, chunk_costs
from megasnn.schedule.fill import Ticks
from megasnn.schedule.generators import gpipe, interleaved, one_f_one_b
from megasnn.schedule.partition import PLACEMENTS
from megasnn.schedule.zero_bubble import ZeroBubble, half_limit, min_limit

AUTO = "auto"  # stands for the best that a search finds

CostsOf = Callable[[tuple[int, ...]], Sequence[ChunkCost]]
"""Placement -> cost of each chunk."""


@dataclass(frozen=True)
class NamedSchedule:
    """A schedule that a user can ask for.

    Attributes:
        summary: for --help.
        order: (stages, micro-batches, chunks on each rank) -> the schedule, computing alone, with backwards in one
            part.
        zero_bubble: of a schedule that splits backwards instead, and puts weight gradients by costs: (stages) -> its
            orders and limit.
        chunks: on each rank when no number is given.
        any_chunks: it can place any other number, too; with fewer than `chunks` it is another schedule.
        placed: name in `PLACEMENTS`.
    """

    summary: str
    order: Callable[[int, int, int], Schedule] | None = None
    zero_bubble: Callable[[int], ZeroBubble] | None = None
    chunks: int = 1
    any_chunks: bool = False
    placed: str = "loop"

    @property
    def looks_at_costs(self) -> bool:
        return self.zero_bubble is not None

    def can_place(self, chunks_per_rank: int) -> bool:
        """True if it can place so many chunks on each rank."""
        return self.any_chunks or chunks_per_rank == self.chunks

    def placement(self, stages: int, chunks: int) -> tuple[int, ...]:
        """Pipeline rank of each chunk."""
        return PLACEMENTS[self.placed](stages, chunks)


SCHEDULES: Registry[NamedSchedule] = Registry(
    "--pipeline-schedule",
    {
        "gpipe": NamedSchedule("all forwards, then all backwards", lambda p, m, v: gpipe(p, m)),
        "1f1b": NamedSchedule("one forward and one backward in turn", lambda p, m, v: one_f_one_b(p, m)),
        "interleaved": NamedSchedule("1f1b over several chunks on each rank", interleaved, chunks=2, any_chunks=True),
        "zb1p": NamedSchedule(
            "1f1b's order and memory, a third of its bubble", zero_bubble=lambda p: ZeroBubble("zb1p", p, p)
        ),
        "zb2p": NamedSchedule(
            "no bubble, with twice that memory", zero_bubble=lambda p: ZeroBubble("zb2p", p, 2 * p, pace=2)
        ),
        "zbv": NamedSchedule(
            "two chunks a rank as a V, no bubble with 1f1b's memory",
            zero_bubble=lambda p: ZeroBubble("zbv", p, p, v=True),
            chunks=2,
            placed="v",
        ),
        "v-half": NamedSchedule(
            "a V with about half of that memory",
            zero_bubble=lambda p: ZeroBubble("v-half", p, half_limit(p), v=True),
            chunks=2,
            placed="v",
        ),
        "v-min": NamedSchedule(
            "a V with about a third of it",
            zero_bubble=lambda p: ZeroBubble("v-min", p, min_limit(p), v=True),
            chunks=2,
            placed="v",
        ),
    },
    also=(AUTO,),
)


def equal_costs(stages: int) -> CostsOf:
    """One unit of time for forward, input gradient and weight gradient of every stage, none for transfers."""
    return per_stage([ChunkCost(1, 1, 1)] * stages)


def per_stage(stages: Sequence[ChunkCost]) -> CostsOf:
    """Costs of whole stages; a chunk's are its share of them."""
    return lambda placement: chunk_costs(stages, placement)


def looks_at_costs(name: str) -> bool:
    """True if the costs of the chunks make a difference to a named schedule, or to the search."""
    return name == AUTO or SCHEDULES[name].looks_at_costs


def named_schedule(
    name: str, stages: int, micro_batches: int, chunks_per_rank: int | None, costs_of: CostsOf
) -> Schedule:
    """A named schedule, computing alone.

    Args:
        chunks_per_rank: the schedule's own number when not given.
        costs_of: costs of each chunk, which decide where weight gradients go.
    """
    named = SCHEDULES[name]
    if named.order is not None:
        return replace(named.order(stages, micro_batches, chunks_per_rank or named.chunks), name=name)
    assert named.zero_bubble is not None, "a schedule has either"
    zero_bubble = named.zero_bubble(stages)
    ticks = Ticks.of(zero_bubble.placement, costs_of(zero_bubble.placement), micro_batches)
    filled = zero_bubble.fill(ticks, micro_batches)
    if filled is None:
        raise ValueError(f"--pipeline-schedule {name} cannot keep its memory on {stages} stages")
    return filled.schedule
