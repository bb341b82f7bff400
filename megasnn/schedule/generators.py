"""Pipeline schedules: the order in which ranks compute. `passes` adds communication.

The papers' letters: p stages, m micro-batches, v chunks per rank. T_F, T_B and T_W are a stage's times for the forward
F, input gradient B and weight gradient W. M_B is one forward's activation memory. B is written I where the backward is
split. Every schedule runs a chunk's backwards in ascending order: all give the same bits.

Zero-bubble schedules are ZB-H1 and ZB-H2 (arXiv 2401.10241), ZBV, V-Half and V-Min (arXiv 2405.15362). Each orders F
and B; `fill` adds W within a limit on activations, in units of M_B:

======  ============================================  ===============
name    order                                         limit
======  ============================================  ===============
zb1p    1F1B; bubble (p-1)(T_F + T_B - T_W)           p (ZB-H1)
zb2p    2(p-r-1) warm-up forwards; no bubble          2p (ZB-H2)
zbv     two chunks in a V; no bubble if times equal   p (ZBV)
v-half  two chunks in a V                             p // 2 + 1
v-min   two chunks in a V                             (p+2) / 3
======  ============================================  ===============

A V schedule repeats a building block: one micro-batch's path down and up the V. A longer path keeps more
micro-batches in flight.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

from megasnn.schedule.actions import Action, Kind, Schedule
from megasnn.schedule.fill import FORWARD, INPUT_GRADIENT, NO_CUTOFF, Filled, Ticks, fill
from megasnn.schedule.partition import loop_placement, v_placement

# Ticks in which a rank has room for all three computations of both its chunks.
PERIOD = 6
# Ticks between neighbouring ranks on each of the four legs, and at the three turns between the legs.
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

    Time (m + p - 1)(T_F + T_B + T_W); peak activations m M_B.
    """
    orders = []
    for stage in range(stages):
        forwards = _all(stage, Kind.FORWARD, micro_batches)
        backwards = _all(stage, Kind.BACKWARD, micro_batches)
        orders.append((*forwards, *backwards))
    return Schedule("gpipe", loop_placement(stages), micro_batches, tuple(orders))


def one_f_one_b(stages: int, micro_batches: int) -> Schedule:
    """Warm-up of p - r - 1 forwards, then one forward and one backward in turn.

    PipeDream-flush (arXiv 2006.09503). Time as for GPipe; peak activations min(p - r, m) M_B on rank r.
    """
    orders = []
    for stage in range(stages):
        forwards = _all(stage, Kind.FORWARD, micro_batches)
        backwards = _all(stage, Kind.BACKWARD, micro_batches)
        warm_up = min(stages - stage - 1, micro_batches)
        orders.append(_alternating(forwards, backwards, warm_up))
    return Schedule("1f1b", loop_placement(stages), micro_batches, tuple(orders))


def _alternating(forwards: Sequence[Action], backwards: Sequence[Action], warm_up: int) -> tuple[Action, ...]:
    """Warm-up forwards, one of each in turn, the remaining backwards."""
    order = [*forwards[:warm_up]]
    for forward, backward in zip(forwards[warm_up:], backwards, strict=False):
        order.append(forward)
        order.append(backward)
    return (*order, *backwards[len(forwards) - warm_up :])


def interleaved(stages: int, micro_batches: int, chunks_per_rank: int = 2) -> Schedule:
    """1F1B over v chunks per rank in a loop (arXiv 2104.04473); micro-batches loop in groups of p.

    Bubble (p - 1)(T_F + T_B + T_W) / v; peak activations p M_B (1 + (p - 1) / (p v)), after a warm-up of 2 (p - r - 1)
    + (v - 1) p forwards.
    """
    if chunks_per_rank == 1:
        plain = one_f_one_b(stages, micro_batches)
        return Schedule("interleaved", plain.placement, micro_batches, plain.actions)
    orders = []
    for rank in range(stages):
        orders.append(_interleaved_order(rank, stages, micro_batches, chunks_per_rank))
    return Schedule("interleaved", loop_placement(stages, chunks_per_rank), micro_batches, tuple(orders))


def _interleaved_order(rank: int, stages: int, micro_batches: int, chunks_per_rank: int) -> tuple[Action, ...]:
    forwards = []
    backwards = []
    # The last group may not be full. Its order is that of a full group, whose surplus micro-batches are dropped at the
    # end: that keeps every dependency.
    for first in range(0, micro_batches, stages):
        for local in range(chunks_per_rank):
            forward_chunk = local * stages + rank
            backward_chunk = (chunks_per_rank - 1 - local) * stages + rank
            for m in range(first, first + stages):
                forwards.append(Action(forward_chunk, Kind.FORWARD, m))
                backwards.append(Action(backward_chunk, Kind.BACKWARD, m))
    # Megatron-LM has the same warm-up.
    warm_up = min(2 * (stages - rank - 1) + (chunks_per_rank - 1) * stages, len(forwards))
    order = _alternating(forwards, backwards, warm_up)
    return tuple(action for action in order if action.key[1] < micro_batches)


def forward_only(placement: tuple[int, ...], micro_batches: int) -> Schedule:
    """Evaluation: each rank runs its ready chunk nearest to the output."""
    orders: list[list[Action]] = [[] for _ in range(max(placement) + 1)]
    done = [0] * len(placement)  # micro-batches computed by each chunk
    while done[-1] < micro_batches:
        ready = {}
        arrived = micro_batches
        for chunk, rank in enumerate(placement):
            if done[chunk] < arrived:
                # Replaces a ready chunk further from the output.
                ready[rank] = chunk
            arrived = done[chunk]
        for rank, chunk in ready.items():
            orders[rank].append(Action(chunk, Kind.FORWARD, done[chunk]))
            done[chunk] += 1
    return Schedule("forward", placement, micro_batches, tuple(map(tuple, orders)), forward_only=True)


def half_limit(stages: int) -> int:
    """In whole-stage micro-batches."""
    return stages // 2 + 1


def min_limit(stages: int) -> int:
    """In whole-stage micro-batches."""
    return -(-(stages + 2) // 3)


@dataclass(frozen=True)
class ZeroBubble:
    """Candidate orders for F and B, and the rules for placing W.

    Attributes:
        limit: activations a rank may hold, in whole-stage micro-batches.
        v: two chunks per rank in a V, instead of one.
        gap: see `fill`.
        pace: with one chunk per rank, warm-up forwards per following rank; 1 is 1F1B.
        most: with one chunk per rank, the most warm-up forwards.
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
        """Fastest order that beats the cutoff; ties go to the smallest bubble. None if there is none."""
        best = None
        for orders in self.orders(micro_batches):
            order = Schedule(self.name, self.placement, micro_batches, tuple(orders))
            filled = fill(ticks, order, self.limit, self.gap, cutoff)
            if filled is not None and (filled.makespan, filled.bubble) < cutoff:
                best = filled
                cutoff = filled.makespan, filled.bubble
        return best

    def orders(self, micro_batches: int) -> Iterator[Orders]:
        """Each rank's forwards and input gradients."""
        if not self.v:
            yield _one_chunk_orders(self.stages, micro_batches, self.pace, self.most)
            return
        yield _full_v_orders(self.stages, micro_batches)
        seen = []
        for steps, turns in BUILDING_BLOCKS:
            block = _block(self.stages, steps, turns)
            if block not in seen:  # on few stages several blocks coincide
                seen.append(block)
                yield _repeated(block, self.stages, micro_batches)


def _one_chunk_orders(stages: int, micro_batches: int, pace: int, most: int | None) -> Orders:
    limit = micro_batches if most is None else min(most, micro_batches)
    orders = []
    for rank in range(stages):
        forwards = _all(rank, FORWARD, micro_batches)
        gradients = _all(rank, INPUT_GRADIENT, micro_batches)
        warm_up = min(pace * (stages - rank - 1), limit)
        orders.append(_alternating(forwards, gradients, warm_up))
    return orders


def _block(stages: int, steps: Sequence[int], turns: Sequence[int]) -> dict[tuple[int, Kind], int]:
    """Tick of each (chunk, kind) for the first micro-batch."""
    placement = v_placement(stages)
    down = range(stages)
    up = range(stages, 2 * stages)
    legs = ((FORWARD, down), (FORWARD, up), (INPUT_GRADIENT, up[::-1]), (INPUT_GRADIENT, down[::-1]))
    waits_before_leg = (0, *turns)
    ticks: dict[tuple[int, Kind], int] = {}
    occupied: list[set[int]] = [set() for _ in range(stages)]
    tick = 0
    for (kind, chunks), wait, step in zip(legs, waits_before_leg, steps, strict=True):
        tick += wait
        for chunk in chunks:
            if chunk != chunks[0]:
                tick += step
            rank = placement[chunk]
            # The block repeats every period: wait while a repetition occupies the rank.
            while tick % PERIOD in occupied[rank]:
                tick += 1
            occupied[rank].add(tick % PERIOD)
            ticks[chunk, kind] = tick
    return ticks


def _repeated(block: dict[tuple[int, Kind], int], stages: int, micro_batches: int) -> Orders:
    placement = v_placement(stages)
    # Each rank's computations: tick within a period, first period, actions of all micro-batches.
    computations: list[list[tuple[int, int, list[Action]]]] = [[] for _ in range(stages)]
    for (chunk, kind), tick in block.items():
        first_period, turn = divmod(tick, PERIOD)
        computations[placement[chunk]].append((turn, first_period, _all(chunk, kind, micro_batches)))
    orders = []
    for own in computations:
        own.sort(key=lambda computation: computation[0])
        last_start = max(first_period for _, first_period, _ in own)
        order = []
        for period in range(last_start + micro_batches):
            for _, first_period, actions in own:
                # Every period, a chunk computes the next micro-batch.
                if 0 <= period - first_period < micro_batches:
                    order.append(actions[period - first_period])
        orders.append(tuple(order))
    return orders


def _full_v_orders(stages: int, micro_batches: int) -> Orders:
    """As many forwards as 1F1B's memory allows before the first gradient returns, then all kinds in turn."""
    orders = []
    for rank in range(stages):
        early_f = rank, FORWARD
        early_i = rank, INPUT_GRADIENT
        late_f = 2 * stages - 1 - rank, FORWARD
        late_i = 2 * stages - 1 - rank, INPUT_GRADIENT
        # Warm-up: forwards down the V, then down and up in turn, then up together with the first gradients.
        computations = [early_f] * (2 * (stages - rank) - 1)
        computations += [late_f, early_f] * rank
        computations += [late_f, late_i] * (stages - rank)
        # Steady state, and the gradients left at the end. Each kind stops after the last micro-batch.
        computations += [early_f, early_i, late_f, late_i] * micro_batches
        computations += [early_i] * micro_batches
        done = {early_f: 0, early_i: 0, late_f: 0, late_i: 0}
        order = []
        for chunk, kind in computations:
            m = done[chunk, kind]
            if m < micro_batches:
                order.append(Action(chunk, kind, m))
                done[chunk, kind] = m + 1
        orders.append(tuple(order))
    return orders


# Cached, since the search for the best schedule asks for the same lists many times. Callers must not change them.
@lru_cache(maxsize=256)
def _all(chunk: int, kind: Kind, micro_batches: int) -> list[Action]:
    return [Action(chunk, kind, m) for m in range(micro_batches)]
