"""Zero-bubble schedules: ZB-H1 and ZB-H2 (arXiv 2401.10241), ZBV, V-Half and V-Min (arXiv 2405.15362).

Letters of the papers: the backward of a stage is split into B (here I), the gradient of its input, which the stage
before waits for, and W, that of its weights, which fills bubbles. T_F, T_B and T_W are their times, M_B is what a
forward keeps, p and m are the numbers of stages and micro-batches. Each schedule is an order of F and B, to which
`fill` adds W, within a limit of activations in units of M_B:

======  ========================================  ===============
name    order                                     limit
======  ========================================  ===============
zb1p    1F1B's; bubble (p-1)(T_F + T_B - T_W)     p (ZB-H1)
zb2p    2(p-r-1) warm-up forwards; no bubble      2p (ZB-H2)
zbv     two chunks as a V; no bubble if all equal p (ZBV)
v-half  two chunks as a V                         p // 2 + 1
v-min   two chunks as a V                         (p+2) / 3
======  ========================================  ===============

The V schedules choose among building blocks: one micro-batch's way down and up the V, forward and backward, repeated
every six ticks so that no two repetitions meet on a rank. How long the way takes says how many micro-batches are under
way.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from operator import itemgetter

from megasnn.schedule.actions import Action, Kind, Schedule
from megasnn.schedule.fill import FORWARD, INPUT_GRADIENT, NO_CUTOFF, Filled, Ticks, fill
from megasnn.schedule.partition import loop_placement, v_placement

PERIOD = 6  # ticks in which a rank has room for all three computations of both chunks
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
Rows = list[tuple[Action, ...]]


def half_limit(stages: int) -> int:
    """Activations that V-Half may hold, in whole stages' micro-batches."""
    return stages // 2 + 1


def min_limit(stages: int) -> int:
    """Activations that V-Min may hold, in whole stages' micro-batches."""
    return -(-(stages + 2) // 3)


@dataclass(frozen=True)
class ZeroBubble:
    """A zero-bubble schedule: an order of F and B, or several to choose from, and what decides where W goes.

    Attributes:
        name: of the schedule. stages: pipeline ranks.
        limit: activations that a rank may hold, in whole stages' micro-batches.
        v: places two chunks on each rank as a V, instead of one.
        gap: as in `fill`.
        pace, most: of one chunk a rank: warm-up forwards for each rank that follows, and how many at most. A pace of 1
            is 1F1B's order.
    """

    name: str
    stages: int
    limit: float
    v: bool = False
    gap: float = 1.0
    pace: int = 1
    most: int | None = None

    @property
    def placement(self) -> tuple[int, ...]:
        return v_placement(self.stages) if self.v else loop_placement(self.stages)

    def fill(self, ticks: Ticks, micro_batches: int, cutoff: tuple[float, float] = NO_CUTOFF) -> Filled | None:
        """Fills the fastest of its orders that keeps its limit and beats the cutoff; None if none does.

        Of equally fast ones that with the smallest bubble inside a rank's span. Args: cutoff: as in `fill`.
        """
        best = None
        for order in self.orders(micro_batches):
            found = fill(ticks, order, self.limit, self.gap, cutoff)
            if found is not None and (found.makespan, found.bubble) < cutoff:
                best, cutoff = found, (found.makespan, found.bubble)
        return best

    def orders(self, micro_batches: int) -> Iterator[Schedule]:
        """Forwards and input gradients of each rank."""

        def order(rows: Rows) -> Schedule:
            return Schedule(self.name, self.placement, micro_batches, tuple(rows))

        if not self.v:
            yield order(_one_chunk_rows(self.stages, micro_batches, self.pace, self.most))
            return
        yield order(_full_v_rows(self.stages, micro_batches))
        blocks = [_block(self.stages, steps, turns) for steps, turns in BLOCKS]
        for index, block in enumerate(blocks):
            if block not in blocks[:index]:  # on few stages some are the same
                yield order(_repeated(block, self.stages, micro_batches))


def _one_chunk_rows(stages: int, micro_batches: int, pace: int, most: int | None) -> Rows:
    """Warm-up, then a forward and an input gradient in turn."""
    rows = []
    for rank in range(stages):
        ahead = min(pace * (stages - rank - 1), micro_batches, micro_batches if most is None else most)
        forwards, gradients = (_all(rank, kind, micro_batches) for kind in (FORWARD, INPUT_GRADIENT))
        row = forwards[:ahead]
        for pair in zip(forwards[ahead:], gradients, strict=False):
            row += pair
        rows.append((*row, *gradients[micro_batches - ahead :]))
    return rows


def _block(stages: int, steps: Sequence[int], turns: Sequence[int]) -> dict[tuple[int, Kind], int]:
    """Ticks of the first micro-batch; later than asked where a repetition is in the way."""
    placement = v_placement(stages)
    down, up = range(stages), range(stages, 2 * stages)
    ways = [(FORWARD, down), (FORWARD, up), (INPUT_GRADIENT, up[::-1]), (INPUT_GRADIENT, down[::-1])]
    ticks: dict[tuple[int, Kind], int] = {}
    taken: list[set[int]] = [set() for _ in range(stages)]
    tick = 0
    for way, (kind, chunks) in enumerate(ways):
        for position, chunk in enumerate(chunks):
            tick += steps[way] if position else (turns[way - 1] if way else 0)
            while tick % PERIOD in taken[placement[chunk]]:
                tick += 1
            taken[placement[chunk]].add(tick % PERIOD)
            ticks[chunk, kind] = tick
    return ticks


def _repeated(ticks: dict[tuple[int, Kind], int], stages: int, micro_batches: int) -> Rows:
    """All micro-batches, one period after another: in the n-th, a chunk is at micro-batch n less its first period."""
    placement = v_placement(stages)
    ways: list[list[tuple[int, int, list[Action]]]] = [[] for _ in range(stages)]
    for (chunk, kind), tick in ticks.items():
        period, turn = divmod(tick, PERIOD)
        ways[placement[chunk]].append((turn, period, _all(chunk, kind, micro_batches)))
    rows = []
    for mine in ways:
        mine.sort(key=itemgetter(0))
        periods = range(max(period for _, period, _ in mine) + micro_batches)
        rows.append(
            tuple(each[n - start] for n in periods for _, start, each in mine if 0 <= n - start < micro_batches)
        )
    return rows


@lru_cache(maxsize=256)
def _all(chunk: int, kind: Kind, micro_batches: int) -> list[Action]:
    return [Action(chunk, kind, m) for m in range(micro_batches)]


def _full_v_rows(stages: int, micro_batches: int) -> Rows:
    """As many forwards as 1F1B's memory allows before the first gradient comes back, then all in turn."""
    rows = []
    for rank in range(stages):
        down, up = rank, 2 * stages - 1 - rank
        steady = [(down, FORWARD), (down, INPUT_GRADIENT), (up, FORWARD), (up, INPUT_GRADIENT)]
        f, i, late_f, late_i = steady
        warm_up = [f] * (2 * (stages - rank) - 1) + [late_f, f] * rank + [late_f, late_i] * (stages - rank)
        done = dict.fromkeys(steady, 0)
        row = []
        for each in warm_up + steady * micro_batches + [i] * micro_batches:
            if done[each] < micro_batches:
                row.append(Action(*each, done[each]))
                done[each] += 1
        rows.append(tuple(row))
    return rows
