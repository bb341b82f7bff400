"""Zero-bubble schedules: ZB-H1 and ZB-H2 (arXiv 2401.10241), ZBV, V-Half and V-Min (arXiv 2405.15362).

Each is an order of forwards and input gradients, `fill` adds the weight gradients. The V schedules choose among
building blocks: one micro-batch's way down and up the V, forward and backward, repeated every six ticks, so
that no two repetitions meet on a rank. How long the way takes says how many micro-batches are under way.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from megasnn.partition import loop_placement, v_placement
from megasnn.schedule.actions import Action, Kind, Schedule
from megasnn.schedule.fill import Filled, Order, fill
from megasnn.schedule.simulate import ChunkCost

PERIOD = 6  # ticks in which a rank has room for both chunks' F, I and W
# Ticks between neighbouring ranks on each of the four ways, and at the three turns between the ways.
BLOCKS = (
    ((1, 1, 1, 1), (1, 1, 1)),
    ((2, 2, 1, 1), (1, 1, 1)),
    ((1, 2, 1, 1), (1, 1, 1)),
    ((1, 2, 2, 1), (3, 1, 3)),
    ((1, 2, 2, 2), (3, 1, 1)),
    ((1, 3, 1, 2), (2, 1, 2)),
    ((2, 1, 2, 1), (1, 1, 1)),
    ((2, 1, 1, 2), (1, 1, 1)),
    ((1, 4, 1, 2), (1, 1, 1)),
    ((2, 3, 1, 1), (1, 1, 1)),
)


def half_limit(stages: int) -> int:
    """The activations V-Half may hold, in whole stages' micro-batches."""
    return stages // 2 + 1


def min_limit(stages: int) -> int:
    """The activations V-Min may hold, in whole stages' micro-batches."""
    return -(-(stages + 2) // 3)


def zb1p(stages: int, micro_batches: int, costs: Sequence[ChunkCost]) -> Schedule | None:
    """1F1B's order and its memory, `stages` micro-batches, with a third of its bubble at equal costs."""
    order = _one_chunk_order(stages, micro_batches, 1)
    return _schedule(fill("zb1p", loop_placement(stages), micro_batches, order, costs, stages))


def short_of_memory(
    name: str, stages: int, micro_batches: int, costs: Sequence[ChunkCost], limit: int
) -> Schedule | None:
    """One chunk a rank and 1F1B's order, with no more than `limit` micro-batches' activations."""
    order = _one_chunk_order(stages, micro_batches, 1, limit - 1)
    return _schedule(fill(name, loop_placement(stages), micro_batches, order, costs, limit))


def zb2p(stages: int, micro_batches: int, costs: Sequence[ChunkCost]) -> Schedule | None:
    """Twice the warm-up and the memory of 1F1B; at equal costs no rank waits between its first and last action."""
    order = _one_chunk_order(stages, micro_batches, 2)
    return _schedule(fill("zb2p", loop_placement(stages), micro_batches, order, costs, 2 * stages))


def zbv(stages: int, micro_batches: int, costs: Sequence[ChunkCost]) -> Schedule | None:
    """Two chunks a rank as a V: at equal costs no bubble with 1F1B's memory."""
    return best_v("zbv", stages, micro_batches, costs, stages)


def v_half(stages: int, micro_batches: int, costs: Sequence[ChunkCost]) -> Schedule | None:
    """About half of 1F1B's memory."""
    return best_v("v-half", stages, micro_batches, costs, half_limit(stages))


def v_min(stages: int, micro_batches: int, costs: Sequence[ChunkCost]) -> Schedule | None:
    """About a third of 1F1B's memory."""
    return best_v("v-min", stages, micro_batches, costs, min_limit(stages))


def _one_chunk_order(stages: int, micro_batches: int, pace: int, most: int | None = None) -> Order:
    """Warm-up of `pace` forwards for each rank that follows, `most` at most; then a forward and an input gradient
    in turn."""
    rows = []
    for rank in range(stages):
        ahead = min(pace * (stages - rank - 1), micro_batches, micro_batches if most is None else most)
        row = [Action(rank, Kind.FORWARD, m) for m in range(ahead)]
        for m in range(micro_batches):
            if ahead + m < micro_batches:
                row.append(Action(rank, Kind.FORWARD, ahead + m))
            row.append(Action(rank, Kind.INPUT_GRADIENT, m))
        rows.append(row)
    return rows


def best_v(
    name: str, stages: int, micro_batches: int, costs: Sequence[ChunkCost], limit: float, gap: float = 1.0
) -> Schedule | None:
    """The fastest V schedule that holds at most `limit` whole stages' micro-batches, None if none does.

    Of equally fast ones that with the smallest bubble inside a rank's span.
    """
    found: list[tuple[float, float, int, Schedule]] = []
    for index, order in enumerate(_v_orders(stages, micro_batches)):
        filled = fill(name, v_placement(stages), micro_batches, order, costs, limit, gap)
        if filled is not None:
            found.append((round(filled.makespan, 9), round(filled.bubble, 9), index, filled.schedule))
    return min(found)[-1] if found else None


def _schedule(filled: Filled | None) -> Schedule | None:
    return None if filled is None else filled.schedule


def _v_orders(stages: int, micro_batches: int) -> Iterator[Order]:
    yield _full_v_order(stages, micro_batches)
    for steps, turns in BLOCKS:
        yield _repeated(_block(stages, steps, turns), stages, micro_batches)


def _block(stages: int, steps: Sequence[int], turns: Sequence[int]) -> dict[tuple[Kind, int], int]:
    """The tick of each forward and input gradient of the first micro-batch; later than asked where a
    repetition is in the way."""
    placement = v_placement(stages)
    down, up = range(stages), range(stages, 2 * stages)
    ways = [(Kind.FORWARD, down), (Kind.FORWARD, up)]
    ways += [(Kind.INPUT_GRADIENT, up[::-1]), (Kind.INPUT_GRADIENT, down[::-1])]
    ticks: dict[tuple[Kind, int], int] = {}
    taken: list[set[int]] = [set() for _ in range(stages)]
    tick = 0
    for way, (kind, chunks) in enumerate(ways):
        for position, chunk in enumerate(chunks):
            tick += steps[way] if position else (turns[way - 1] if way else 0)
            while tick % PERIOD in taken[placement[chunk]]:
                tick += 1
            taken[placement[chunk]].add(tick % PERIOD)
            ticks[kind, chunk] = tick
    return ticks


def _repeated(ticks: dict[tuple[Kind, int], int], stages: int, micro_batches: int) -> Order:
    rows: list[list[tuple[int, Action]]] = [[] for _ in range(stages)]
    placement = v_placement(stages)
    for (kind, chunk), tick in ticks.items():
        for m in range(micro_batches):
            rows[placement[chunk]].append((tick + PERIOD * m, Action(chunk, kind, m)))
    return [[action for _, action in sorted(row, key=lambda timed: timed[0])] for row in rows]


def _full_v_order(stages: int, micro_batches: int) -> Order:
    """As many forwards as 1F1B's memory allows before the first gradient comes back, then all in turn."""
    rows = []
    for rank in range(stages):
        streams = {
            key: [Action(chunk, kind, m) for m in range(micro_batches)]
            for key, kind, chunk in (
                ("f", Kind.FORWARD, rank),
                ("F", Kind.FORWARD, 2 * stages - 1 - rank),
                ("i", Kind.INPUT_GRADIENT, rank),
                ("I", Kind.INPUT_GRADIENT, 2 * stages - 1 - rank),
            )
        }
        warm_up = "f" * (2 * (stages - rank) - 1) + "Ff" * rank + "FI" * (stages - rank)
        row = []
        for key in warm_up + "fiFI" * micro_batches:
            if streams[key]:
                row.append(streams[key].pop(0))
        rows.append(row + streams["i"])
    return rows
