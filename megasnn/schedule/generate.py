"""Every schedule there is, by name, and the search for the best one."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from megasnn.partition import loop_placement, v_placement
from megasnn.schedule.actions import Schedule
from megasnn.schedule.basic import gpipe, one_f_one_b
from megasnn.schedule.interleaved import interleaved
from megasnn.schedule.passes import insert_gradient_sync, insert_transfers
from megasnn.schedule.simulate import ChunkCost, chunk_costs, simulate
from megasnn.schedule.validate import ROUNDING, validate
from megasnn.schedule.zero_bubble import best_v, half_limit, min_limit, short_of_memory, v_half, v_min, zb1p, zb2p, zbv

CostsOf = Callable[[tuple[int, ...]], Sequence[ChunkCost]]  # placement -> cost of each chunk

ONE_CHUNK = {"gpipe": gpipe, "1f1b": one_f_one_b}
ZERO_BUBBLE = {"zb1p": zb1p, "zb2p": zb2p, "zbv": zbv, "v-half": v_half, "v-min": v_min}
V_NAMES = ("zbv", "v-half", "v-min")
NAMES = (*ONE_CHUNK, "interleaved", *ZERO_BUBBLE)
GENERATED_NAMES = (*NAMES, "auto")
LOOK_AT_COSTS = (*ZERO_BUBBLE, "auto")
GAPS = (1.0, 0.5)  # parts of a weight gradient's time that a rank waits at least before it takes one in


def equal_costs(stages: int) -> CostsOf:
    """Forward, input gradient and weight gradient of every stage take one unit each, transfers none."""
    return per_stage([ChunkCost(1, 2)] * stages)


def per_stage(stages: Sequence[ChunkCost]) -> CostsOf:
    """Costs of whole stages; a chunk's are its share of them."""
    return lambda placement: chunk_costs(stages, placement)


def generate(
    name: str,
    stages: int,
    micro_batches: int,
    chunks_per_rank: int | None = None,
    costs_of: CostsOf | None = None,
    memory_limit: float | None = None,
) -> Schedule:
    """A validated schedule with transfers and gradient sync, of any name in `GENERATED_NAMES`.

    Args:
        stages: pipeline ranks.
        chunks_per_rank: what the name stands for when not given: 2 for interleaved and the V schedules, else
            1; auto tries 1 and 2.
        costs_of: the costs of each chunk, which decide where weight gradients go; equal ones when not given.
        memory_limit: activations a rank may hold, in the unit of the costs (whole stages' micro-batches).
    Raises:
        ValueError: an unknown name, sizes below 1, chunks the schedule cannot place, or a limit it cannot keep.
    """
    _check_sizes(name, stages, micro_batches, chunks_per_rank)
    costs_of = costs_of or equal_costs(stages)
    if name == "auto":
        return find_best(stages, micro_batches, costs_of, memory_limit, chunks_per_rank)
    schedule = _complete(_order(name, stages, micro_batches, chunks_per_rank, costs_of))
    _keep_limit(schedule, costs_of, memory_limit)
    return schedule


def find_best(
    stages: int,
    micro_batches: int,
    costs_of: CostsOf,
    memory_limit: float | None = None,
    chunks_per_rank: int | None = None,
    placement: tuple[int, ...] | None = None,
) -> Schedule:
    """The schedule of least simulated makespan that keeps the limit; among equals the one that holds least.

    Tried are all named ones, filled by these costs and by equal ones, 1F1B's order with every smaller memory,
    and the V schedules with several memory limits and shorter gaps filled. It is never slower than a named one
    that fits, and with one chunk a rank there is always one that holds a single micro-batch. With a `placement`,
    only schedules on it are looked at.

    Raises ValueError when none keeps the limit.
    """
    found = []
    for index, order in enumerate(_candidates(stages, micro_batches, costs_of, chunks_per_rank)):
        if placement not in (None, order.placement):
            continue
        complete = _complete(order)
        result = simulate(complete, costs_of(complete.placement))
        held = max(result.peak_activations)
        found.append((result.makespan, held, index, complete))
    fitting = [each for each in found if memory_limit is None or each[1] <= memory_limit + ROUNDING]
    if not fitting:
        least = min(held for _, held, _, _ in found)
        raise ValueError(
            f"--pipeline-memory-limit {memory_limit:g}: no schedule for {stages} stages and {micro_batches} "
            f"micro-batches holds so little; the least found is {least:g}"
        )
    best = min(fitting)[-1]
    _keep_limit(best, costs_of, memory_limit)
    return best


def _candidates(stages: int, micro_batches: int, costs_of: CostsOf, chunks_per_rank: int | None) -> list[Schedule]:
    counts = (1, 2) if chunks_per_rank is None else (chunks_per_rank,)
    found = []
    for count in counts:
        for name in NAMES:
            if possible_chunks(name, count):
                found.append(_order(name, stages, micro_batches, count, costs_of))
                if name in LOOK_AT_COSTS:
                    found.append(_order(name, stages, micro_batches, count, equal_costs(stages)))
    if 1 in counts:
        costs = costs_of(loop_placement(stages))
        for limit in range(1, stages):
            schedule = short_of_memory(f"zb1p within {limit}", stages, micro_batches, costs, limit)
            found += [schedule] if schedule is not None else []
    if 2 in counts:
        costs = costs_of(v_placement(stages))
        for limit in {min_limit(stages), half_limit(stages), stages, stages + stages // 2, 2 * stages}:
            for gap in GAPS:
                schedule = best_v(f"V within {limit}", stages, micro_batches, costs, limit, gap)
                found += [schedule] if schedule is not None else []
    return found


def _order(name: str, stages: int, micro_batches: int, chunks_per_rank: int | None, costs_of: CostsOf) -> Schedule:
    """Computing alone."""
    if name in ONE_CHUNK:
        return ONE_CHUNK[name](stages, micro_batches)
    if name == "interleaved":
        return interleaved(stages, micro_batches, 2 if chunks_per_rank is None else chunks_per_rank)
    placement = v_placement(stages) if name in V_NAMES else loop_placement(stages)
    schedule = ZERO_BUBBLE[name](stages, micro_batches, costs_of(placement))
    if schedule is None:
        raise ValueError(f"--pipeline-schedule {name} cannot keep its memory on {stages} stages")
    return schedule


def _complete(order: Schedule) -> Schedule:
    return insert_gradient_sync(insert_transfers(order))


def _keep_limit(schedule: Schedule, costs_of: CostsOf, memory_limit: float | None) -> None:
    validate(schedule, memory_limit, [cost.activation for cost in costs_of(schedule.placement)])


def possible_chunks(name: str, chunks_per_rank: int) -> bool:
    if name == "interleaved":
        return True
    return chunks_per_rank == (2 if name in V_NAMES else 1)


def _check_sizes(name: str, stages: int, micro_batches: int, chunks_per_rank: int | None) -> None:
    if name not in GENERATED_NAMES:
        raise ValueError(f"unknown --pipeline-schedule {name!r}; known: {', '.join(GENERATED_NAMES)}")
    for flag, value in (
        ("--pipeline-model-parallel-size", stages),
        ("number of micro-batches", micro_batches),
        ("--num-virtual-stages-per-pipeline-rank", 1 if chunks_per_rank is None else chunks_per_rank),
    ):
        if value < 1:
            raise ValueError(f"{flag} must be at least 1, got {value}")
    if chunks_per_rank is not None and name != "auto" and not possible_chunks(name, chunks_per_rank):
        raise ValueError(
            f"--num-virtual-stages-per-pipeline-rank {chunks_per_rank}: --pipeline-schedule {name} computes "
            f"{2 if name in V_NAMES else 1} chunk(s) per pipeline rank"
        )
