"""Schedules as orders of computations, and evaluation; `passes` adds the rest.

Letters of the papers: p stages, m micro-batches, v chunks on each rank; T_F, T_B and T_W are the times of a stage's
forward F, input gradient B and weight gradient W for one micro-batch, and M_B is what its forward keeps. Here B is
written I where the backward is split. Each function is a whole schedule. Micro-batches run backward in ascending order
in all of them, so gradients are accumulated in the same order and every schedule gives the same bits.

Zero-bubble schedules are ZB-H1 and ZB-H2 (arXiv 2401.10241), ZBV, V-Half and V-Min (arXiv 2405.15362). Each is an order
of F and B, to which `fill` adds W, within a limit of activations in units of M_B:

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
every six ticks so that no two repetitions meet on a rank. The length of the way gives the number of micro-batches that
are under way.
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
BUILDING_BLOCKS = (
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
Orders = list[tuple[Action, ...]]


def gpipe(stages: int, micro_batches: int) -> Schedule:
    """All forwards, then all backwards (arXiv 1811.06965).

    Time (m + p - 1)(T_F + T_B + T_W); peak activations m M_B on every rank.
    """
    actions = tuple(
        tuple(
            [Action(stage, Kind.FORWARD, m) for m in range(micro_batches)]
            + [Action(stage, Kind.BACKWARD, m) for m in range(micro_batches)]
        )
        for stage in range(stages)
    )
    return Schedule("gpipe", tuple(range(stages)), micro_batches, actions)


def one_f_one_b(stages: int, micro_batches: int) -> Schedule:
    """Warm-up of p - r - 1 forwards, then one forward and one backward in turn (PipeDream-flush, arXiv 2006.09503).

    Time as of GPipe; peak activations min(p - r, m) M_B on rank r.
    """
    actions = []
    for stage in range(stages):
        warm_up = min(stages - stage - 1, micro_batches)
        steady = micro_batches - warm_up
        order = [Action(stage, Kind.FORWARD, m) for m in range(warm_up)]
        for m in range(steady):
            order.append(Action(stage, Kind.FORWARD, warm_up + m))
            order.append(Action(stage, Kind.BACKWARD, m))
        order += [Action(stage, Kind.BACKWARD, m) for m in range(steady, micro_batches)]
        actions.append(tuple(order))
    return Schedule("1f1b", tuple(range(stages)), micro_batches, tuple(actions))


def interleaved(stages: int, micro_batches: int, chunks_per_rank: int = 2) -> Schedule:
    """1F1B over v chunks on each rank, placed in a loop (arXiv 2104.04473).

    Bubble (p - 1)(T_F + T_B + T_W) / v; peak activations p M_B (1 + (p - 1) / (p v)), after a warm-up of 2 (p - r - 1)
    + (v - 1) p forwards. Micro-batches go round the loop in groups of p. Where the last group is not full, the order is
    that of a full one without what is missing, which keeps every dependency. One chunk a rank is 1F1B.
    """
    if chunks_per_rank == 1:
        plain = one_f_one_b(stages, micro_batches)
        return Schedule("interleaved", plain.placement, micro_batches, plain.actions)
    orders = tuple(_interleaved_order(rank, stages, micro_batches, chunks_per_rank) for rank in range(stages))
    return Schedule("interleaved", loop_placement(stages, chunks_per_rank), micro_batches, orders)


def _interleaved_order(rank: int, stages: int, micro_batches: int, chunks_per_rank: int) -> tuple[Action, ...]:
    groups = range(0, micro_batches, stages)
    rounds = [(local, m) for first in groups for local in range(chunks_per_rank) for m in range(first, first + stages)]
    forwards = [Action(local * stages + rank, Kind.FORWARD, m) for local, m in rounds]
    backwards = [Action((chunks_per_rank - 1 - local) * stages + rank, Kind.BACKWARD, m) for local, m in rounds]
    warm_up = min(2 * (stages - rank - 1) + (chunks_per_rank - 1) * stages, len(forwards))
    order = forwards[:warm_up]
    for forward, backward in zip(forwards[warm_up:], backwards, strict=False):
        order += [forward, backward]
    order += backwards[len(forwards) - warm_up :]
    return tuple(action for action in order if action.micro_batch is not None and action.micro_batch < micro_batches)


def forward_only(placement: tuple[int, ...], micro_batches: int) -> Schedule:
    """Evaluation on any placement: a rank takes the ready chunk that is nearest to the end."""
    chunks = len(placement)
    orders: list[list[Action]] = [[] for _ in range(max(placement) + 1)]
    done = [0] * chunks  # micro-batches that each chunk has computed
    while done[-1] < micro_batches:
        ready = {placement[c]: c for c in range(chunks) if done[c] < (done[c - 1] if c else micro_batches)}
        for rank, chunk in ready.items():
            orders[rank].append(Action(chunk, Kind.FORWARD, done[chunk]))
        for chunk in ready.values():
            done[chunk] += 1
    return Schedule("forward", placement, micro_batches, tuple(map(tuple, orders)), forward_only=True)


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

        def order(orders_of_ranks: Orders) -> Schedule:
            return Schedule(self.name, self.placement, micro_batches, tuple(orders_of_ranks))

        if not self.v:
            yield order(_one_chunk_orders(self.stages, micro_batches, self.pace, self.most))
            return
        yield order(_full_v_orders(self.stages, micro_batches))
        blocks = [_block(self.stages, steps, turns) for steps, turns in BUILDING_BLOCKS]
        for index, block in enumerate(blocks):
            if block not in blocks[:index]:  # on few stages some are the same
                yield order(_repeated(block, self.stages, micro_batches))


def _one_chunk_orders(stages: int, micro_batches: int, pace: int, most: int | None) -> Orders:
    """Warm-up, then a forward and an input gradient in turn."""
    orders = []
    for rank in range(stages):
        ahead = min(pace * (stages - rank - 1), micro_batches, micro_batches if most is None else most)
        forwards, gradients = (_all(rank, kind, micro_batches) for kind in (FORWARD, INPUT_GRADIENT))
        order = forwards[:ahead]
        for pair in zip(forwards[ahead:], gradients, strict=False):
            order += pair
        orders.append((*order, *gradients[micro_batches - ahead :]))
    return orders


def _block(stages: int, steps: Sequence[int], turns: Sequence[int]) -> dict[tuple[int, Kind], int]:
    """Ticks of the first micro-batch; later than asked where a repetition is in the way."""
    placement = v_placement(stages)
    down, up = range(stages), range(stages, 2 * stages)
    ways = [(FORWARD, down), (FORWARD, up), (INPUT_GRADIENT, up[::-1]), (INPUT_GRADIENT, down[::-1])]
    ticks: dict[tuple[int, Kind], int] = {}
    occupied: list[set[int]] = [set() for _ in range(stages)]
    tick = 0
    for way, (kind, chunks) in enumerate(ways):
        for position, chunk in enumerate(chunks):
            tick += steps[way] if position else (turns[way - 1] if way else 0)
            while tick % PERIOD in occupied[placement[chunk]]:
                tick += 1
            occupied[placement[chunk]].add(tick % PERIOD)
            ticks[chunk, kind] = tick
    return ticks


def _repeated(ticks: dict[tuple[int, Kind], int], stages: int, micro_batches: int) -> Orders:
    """All micro-batches, one period after another: in the n-th, a chunk is at micro-batch n less its first period."""
    placement = v_placement(stages)
    ways: list[list[tuple[int, int, list[Action]]]] = [[] for _ in range(stages)]
    for (chunk, kind), tick in ticks.items():
        period, turn = divmod(tick, PERIOD)
        ways[placement[chunk]].append((turn, period, _all(chunk, kind, micro_batches)))
    orders = []
    for mine in ways:
        mine.sort(key=itemgetter(0))
        periods = range(max(period for _, period, _ in mine) + micro_batches)
        orders.append(
            tuple(each[n - start] for n in periods for _, start, each in mine if 0 <= n - start < micro_batches)
        )
    return orders


@lru_cache(maxsize=256)
def _all(chunk: int, kind: Kind, micro_batches: int) -> list[Action]:
    return [Action(chunk, kind, m) for m in range(micro_batches)]


def _full_v_orders(stages: int, micro_batches: int) -> Orders:
    """As many forwards as 1F1B's memory allows before the first gradient comes back, then all in turn."""
    orders = []
    for rank in range(stages):
        down, up = rank, 2 * stages - 1 - rank
        steady = [(down, FORWARD), (down, INPUT_GRADIENT), (up, FORWARD), (up, INPUT_GRADIENT)]
        f, i, late_f, late_i = steady
        warm_up = [f] * (2 * (stages - rank) - 1) + [late_f, f] * rank + [late_f, late_i] * (stages - rank)
        done = dict.fromkeys(steady, 0)
        order = []
        for each in warm_up + steady * micro_batches + [i] * micro_batches:
            if done[each] < micro_batches:
                order.append(Action(*each, done[each]))
                done[each] += 1
        orders.append(tuple(order))
    return orders
