"""From a name to a schedule that can run."""

from __future__ import annotations

from megasnn.schedule.actions import Schedule
from megasnn.schedule.named import (
    AUTO,
    SCHEDULES,
    CostsOf,
    complete,
    equal_costs,
    keep_limit,
    named_schedule,
    possible_chunks,
)
from megasnn.schedule.search import find_best


def generate(
    name: str,
    stages: int,
    micro_batches: int,
    chunks_per_rank: int | None = None,
    costs_of: CostsOf | None = None,
    memory_limit: float | None = None,
) -> Schedule:
    """A validated schedule with transfers and gradient sync, of a name in `SCHEDULES`, or the best: auto.

    Args:
        stages: pipeline ranks.
        chunks_per_rank: the schedule's own number when not given; auto tries 1 and 2.
        costs_of: the costs of each chunk, which decide where weight gradients go; equal ones when not given.
        memory_limit: activations a rank may hold, in the unit of the costs (whole stages' micro-batches).
    Raises:
        ValueError: an unknown name, sizes below 1, chunks the schedule cannot place, or a limit it cannot keep.
    """
    _check_sizes(name, stages, micro_batches, chunks_per_rank)
    costs_of = costs_of or equal_costs(stages)
    if name == AUTO:
        return find_best(stages, micro_batches, costs_of, memory_limit, chunks_per_rank)
    schedule = complete(named_schedule(name, stages, micro_batches, chunks_per_rank, costs_of))
    keep_limit(schedule, costs_of, memory_limit)
    return schedule


def _check_sizes(name: str, stages: int, micro_batches: int, chunks_per_rank: int | None) -> None:
    named = None if name == AUTO else SCHEDULES[name]
    for flag, value in (
        ("--pipeline-model-parallel-size", stages),
        ("number of micro-batches", micro_batches),
        ("--num-virtual-stages-per-pipeline-rank", 1 if chunks_per_rank is None else chunks_per_rank),
    ):
        if value < 1:
            raise ValueError(f"{flag} must be at least 1, got {value}")
    if named is not None and chunks_per_rank is not None and not possible_chunks(name, chunks_per_rank):
        raise ValueError(
            f"--num-virtual-stages-per-pipeline-rank {chunks_per_rank}: --pipeline-schedule {name} computes "
            f"{named.chunks} chunk(s) per pipeline rank"
        )
