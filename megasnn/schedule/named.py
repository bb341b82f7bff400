"""The schedules that have names, computing alone or complete."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from megasnn.schedule.actions import Schedule
from megasnn.schedule.basic import gpipe, one_f_one_b
from megasnn.schedule.interleaved import interleaved
from megasnn.schedule.memory import activations_held
from megasnn.schedule.partition import loop_placement, v_placement
from megasnn.schedule.passes import insert_gradient_sync, insert_transfers
from megasnn.schedule.simulate import ChunkCost, chunk_costs
from megasnn.schedule.streams import Ticks, as_schedule
from megasnn.schedule.validate import validate
from megasnn.schedule.zero_bubble import named_recipes

CostsOf = Callable[[tuple[int, ...]], Sequence[ChunkCost]]  # placement -> cost of each chunk

ONE_CHUNK = {"gpipe": gpipe, "1f1b": one_f_one_b}
V_NAMES = ("zbv", "v-half", "v-min")
ZERO_BUBBLE = ("zb1p", "zb2p", *V_NAMES)
NAMES = (*ONE_CHUNK, "interleaved", *ZERO_BUBBLE)
GENERATED_NAMES = (*NAMES, "auto")
LOOK_AT_COSTS = (*ZERO_BUBBLE, "auto")


def equal_costs(stages: int) -> CostsOf:
    """Forward, input gradient and weight gradient of every stage take one unit each, transfers none."""
    return per_stage([ChunkCost(1, 2)] * stages)


def per_stage(stages: Sequence[ChunkCost]) -> CostsOf:
    """Costs of whole stages; a chunk's are its share of them."""
    return lambda placement: chunk_costs(stages, placement)


def possible_chunks(name: str, chunks_per_rank: int) -> bool:
    """Whether a named schedule can place so many chunks on each rank."""
    if name == "interleaved":
        return True
    return chunks_per_rank == (2 if name in V_NAMES else 1)


def placement_of(name: str, stages: int, chunks_per_rank: int) -> tuple[int, ...]:
    """Where a named schedule places its chunks."""
    return v_placement(stages) if name in V_NAMES else loop_placement(stages, chunks_per_rank)


def named_schedule(
    name: str, stages: int, micro_batches: int, chunks_per_rank: int | None, costs_of: CostsOf
) -> Schedule:
    """A named schedule, computing alone.

    Args:
        chunks_per_rank: of interleaved; 2 when not given.
        costs_of: the costs of each chunk, which decide where weight gradients go.
    """
    if name in ONE_CHUNK:
        return ONE_CHUNK[name](stages, micro_batches)
    if name == "interleaved":
        return interleaved(stages, micro_batches, 2 if chunks_per_rank is None else chunks_per_rank)
    recipe = named_recipes(stages)[name]
    filled = recipe.fill(Ticks.of(recipe.placement, costs_of(recipe.placement), micro_batches), micro_batches)
    if filled is None:
        raise ValueError(f"--pipeline-schedule {name} cannot keep its memory on {stages} stages")
    return as_schedule(name, recipe.placement, micro_batches, filled.rows)


def least_held(name: str, stages: int, micro_batches: int, chunks_per_rank: int | None = None) -> float:
    """What a rank holds at least with a schedule, in whole stages' micro-batches, as far as its warm-up alone says.

    Exact for gpipe, 1f1b, interleaved and zb1p: the first rank holds the most. For those whose order is searched it is
    the one micro-batch that every schedule holds.
    """
    if name == "interleaved":
        return max(activations_held(interleaved(stages, micro_batches, chunks_per_rank or 2), rank=0))
    warm_up = {"gpipe": micro_batches, "1f1b": stages, "zb1p": stages, "zb2p": 2 * stages - 1}
    return min(warm_up.get(name, 1), micro_batches)


def complete(order: Schedule) -> Schedule:
    """With transfers and gradient sync."""
    return insert_gradient_sync(insert_transfers(order))


def keep_limit(schedule: Schedule, costs_of: CostsOf, memory_limit: float | None) -> None:
    """Validates a complete schedule. Raises ScheduleError where it is wrong, or holds more than the limit."""
    validate(schedule, memory_limit, [cost.activation for cost in costs_of(schedule.placement)])
