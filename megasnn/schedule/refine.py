"""From a schedule of chunks to one of their units, and from there to one that computes activations again.

Both are passes over a complete schedule. In the result every unit is a chunk, so that whatever reads schedules reads
it: validation, simulation, pictures, the executor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import accumulate

from megasnn.registry import Registry
from megasnn.schedule.actions import COMPUTE, PROPAGATING, RECEIVES, Action, Kind, Schedule

_OF_ALL_UNITS = {Kind.FORWARD: 1, Kind.BACKWARD: -1, Kind.INPUT_GRADIENT: -1, Kind.WEIGHT_GRADIENT: -1}
_OF_ALL_UNITS[Kind.SYNC_GRADIENTS] = -1
_OF_FIRST_UNIT = {Kind.RECV_FORWARD, Kind.SEND_BACKWARD}


def refine(schedule: Schedule, units: Sequence[int]) -> Schedule:
    """Every computation of a chunk becomes those of its units: forwards ascending, backwards descending.

    Same order of all sums, same makespan.

    Args:
        units: how many each chunk has.
    Raises:
        ValueError: a chunk without one, another number of chunks.
    """
    if len(units) != schedule.chunks or min(units) < 1:
        raise ValueError(f"{list(units)} units for {schedule.chunks} chunks: each needs one or more")
    firsts = [0, *accumulate(units)]
    return replace(
        schedule,
        placement=tuple(rank for rank, count in zip(schedule.placement, units, strict=True) for _ in range(count)),
        actions=tuple(tuple(unit for each in row for unit in _of_units(each, firsts)) for row in schedule.actions),
    )


def _of_units(action: Action, firsts: Sequence[int]) -> Iterator[Action]:
    chunk, kind, m = action
    units = range(firsts[chunk], firsts[chunk + 1])
    if kind in _OF_ALL_UNITS:
        yield from (Action(unit, kind, m) for unit in units[:: _OF_ALL_UNITS[kind]])
    else:
        yield Action(units[0] if kind in _OF_FIRST_UNIT else units[-1], kind, m)


RECOMPUTE: Registry[Callable[[int, int], bool]] = Registry(
    "--recompute",
    {
        "never": lambda micro_batch, micro_batches: False,
        "except-last": lambda micro_batch, micro_batches: micro_batch < micro_batches - 1,
        "always": lambda micro_batch, micro_batches: True,
    },
)
"""By name: (micro-batch, number of micro-batches) -> whether its forwards are computed again."""

NEVER = "never"


def insert_recompute(schedule: Schedule, wanted: Callable[[int, int], bool]) -> Schedule:
    """Adds an R before the backward of each (chunk, micro-batch) that is wanted; its forward leaves nothing then.

    It is done before the rank waits for what the backward needs. Where nothing is computed between forward and backward
    there is nothing to gain, and no R.
    """
    return replace(schedule, actions=tuple(with_recompute(row, wanted) for row in schedule.actions))


def with_recompute(row: Sequence[Action], wanted: Callable[[int, int], bool]) -> tuple[Action, ...]:
    result: list[Action] = []
    computed: Action | None = None  # the last computation
    for action in row:
        chunk, kind, m = action
        forward = Action(chunk, Kind.FORWARD, m)
        if kind in PROPAGATING and m is not None and wanted(chunk, m) and computed != forward:
            at = len(result)
            while at and result[at - 1].kind in RECEIVES:
                at -= 1
            result.insert(at, Action(chunk, Kind.RECOMPUTE, m))
        result.append(action)
        if kind in COMPUTE:
            computed = action
    return tuple(result)
