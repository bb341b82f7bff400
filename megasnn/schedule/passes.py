"""Passes over a schedule, which turn an order of computations into actions that an executor can run.

Communication is added by a pass, not by the generators, as ``_add_send_recv`` in ``torch.distributed.pipelining`` does:
a generator says in what order to compute, and nothing else. `refine` and `insert_recompute` are passes over a complete
schedule, whose result whatever reads schedules reads, too.

Passes for weights that replicas share say when units are gathered and freed, and when gradients are reduce-scattered.
They take a complete schedule of units. While a unit computes, its own weights are there, and the weights of the unit
that the rank uses next are gathered.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from megasnn.common.registry import Registry
from megasnn.schedule.actions import (
    COMPUTE,
    FINISHING,
    PROPAGATING,
    RECEIVES,
    SENDS,
    SHARDING,
    USES_WEIGHTS,
    Action,
    Kind,
    Schedule,
    crosses,
)
from megasnn.schedule.costs import weights_held
from megasnn.schedule.validate import validate_weights

_OF_ALL_UNITS = {Kind.FORWARD: 1, Kind.BACKWARD: -1, Kind.INPUT_GRADIENT: -1, Kind.WEIGHT_GRADIENT: -1}
_OF_ALL_UNITS[Kind.REDUCE_GRAD] = -1
_OF_FIRST_UNIT = {Kind.RECV_FORWARD, Kind.SEND_BACKWARD}
NEVER = "never"
AT_ONCE = 2  # gathers on their way: of the unit that computes next, and of the one behind it


def complete(order: Schedule) -> Schedule:
    """Adds transfers and the reduction of gradients to a schedule that only computes."""
    return insert_gradient_reduction(insert_transfers(order))


def insert_transfers(schedule: Schedule) -> Schedule:
    """Adds a receive right before each computation that needs one and a send after each that has a taker.

    Neighbouring units on the same rank hand their tensors over without a transfer. A link is all that one rank sends
    to another, forward and backward. Receives on it are in the order of the sends: one whose turn comes before it is
    needed is received early.
    """
    placement, links = schedule.placement, defaultdict[tuple[int, int], deque[Action]](deque)
    for rank, order in enumerate(schedule.actions):
        for send in filter(None, (_send(action, placement) for action in order)):
            links[rank, placement[send.peer.unit]].append(send.peer)
    rows = (tuple(_with_transfers(order, rank, placement, links)) for rank, order in enumerate(schedule.actions))
    return replace(schedule, actions=tuple(rows))


def _with_transfers(
    order: Sequence[Action], rank: int, placement: Sequence[int], links: Mapping[tuple[int, int], deque[Action]]
) -> Iterator[Action]:
    early: set[Action] = set()
    for action in order:
        needed = _receive(action, placement)
        if needed is not None and needed not in early:
            link = links[placement[needed.peer.unit], rank]
            while link:
                following = link.popleft()
                yield following
                if following == needed:
                    break
                early.add(following)
        yield action
        send = _send(action, placement)
        if send is not None:
            yield send


def _send(action: Action, placement: Sequence[int]) -> Action | None:
    """Send behind a computation."""
    unit, kind, m = action
    if kind is Kind.FORWARD and crosses(placement, unit):
        return Action(unit, Kind.SEND_FORWARD, m)
    return Action(unit, Kind.SEND_BACKWARD, m) if kind in PROPAGATING and crosses(placement, unit - 1) else None


def _receive(action: Action, placement: Sequence[int]) -> Action | None:
    """Receive before a computation."""
    unit, kind, m = action
    if kind is Kind.FORWARD and crosses(placement, unit - 1):
        return Action(unit, Kind.RECV_FORWARD, m)
    return Action(unit, Kind.RECV_BACKWARD, m) if kind in PROPAGATING and crosses(placement, unit) else None


def insert_gradient_reduction(schedule: Schedule) -> Schedule:
    """Adds a REDUCE_GRAD for each unit after its last backward and the send that others wait for."""
    rows = tuple(_with_reduction(order, set(schedule.units_of(rank))) for rank, order in enumerate(schedule.actions))
    return replace(schedule, actions=rows)


def _with_reduction(order: tuple[Action, ...], units: set[int]) -> tuple[Action, ...]:
    result = list(order)
    for index in range(len(order) - 1, -1, -1):
        if not units:
            break
        unit, kind, _ = order[index]
        if unit in units and (kind in FINISHING or kind is Kind.SEND_BACKWARD):
            units.discard(unit)
            result.insert(index + 1, Action(unit, Kind.REDUCE_GRAD))
    return tuple(result)


def refine(schedule: Schedule, units: Sequence[int]) -> Schedule:
    """Splits every computation of a chunk into those of its units: forwards ascending, backwards descending.

    Same order of all sums, same makespan. `units` has the number of units of each chunk, one or more.
    """
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


def insert_recompute(schedule: Schedule, wanted: Callable[[int, int], bool]) -> Schedule:
    """Adds an R before the backward of each (unit, micro-batch) that is wanted; its forward keeps its input alone.

    R comes before the rank waits for what the backward needs. Where nothing is computed between forward and backward
    there is nothing to gain, and no R.
    """
    return replace(schedule, actions=tuple(with_recompute(row, wanted) for row in schedule.actions))


def with_recompute(row: Sequence[Action], wanted: Callable[[int, int], bool]) -> tuple[Action, ...]:
    """One rank's actions with R, as `insert_recompute` adds them."""
    result: list[Action] = []
    computed: Action | None = None  # the last computation
    for action in row:
        unit, kind, m = action
        forward = Action(unit, Kind.FORWARD, m)
        if kind in PROPAGATING and m is not None and wanted(unit, m) and computed != forward:
            at = len(result)
            while at and result[at - 1].kind in RECEIVES:
                at -= 1
            result.insert(at, Action(unit, Kind.RECOMPUTE, m))
        result.append(action)
        if kind in COMPUTE:
            computed = action
    return tuple(result)


@dataclass(frozen=True)
class SharedWeights:
    """Weights to gather.

    Attributes:
        unit_bytes: of the gathered weights of each unit; 0: it has none.
        scattered: units whose gradients are scattered after every micro-batch.
        ranks: that shard them.
    """

    unit_bytes: tuple[int, ...]
    scattered: frozenset[int] = frozenset()
    ranks: int = 2

    def insert(self, schedule: Schedule) -> Schedule:
        """Adds UNSHARD, RESHARD and REDUCE_SCATTER, proved right."""
        scattered = schedule if schedule.forward_only else insert_reduce_scatters(schedule, self.scattered)
        complete = insert_unshards(scattered, self.unit_bytes)
        validate_weights(complete, self.unit_bytes, self.scattered)
        return complete

    def gathered_and_buffers(self, schedule: Schedule, rank: int) -> tuple[int, int]:
        """Most bytes of gathered weights that a rank holds, and of what comes, and with more than two ranks goes, on
        its way."""
        units = [self.unit_bytes[unit] for unit in schedule.units_of(rank) if self.unit_bytes[unit]]
        travelling = max(units, default=0) * (self.ranks - 1) // self.ranks * (1 if self.ranks == 2 else 2)
        return max(weights_held(schedule, rank, self.unit_bytes)), travelling * min(AT_ONCE, len(units))


def insert_unshards(schedule: Schedule, unit_bytes: Sequence[int]) -> Schedule:
    """Adds an UNSHARD before computations that do not find their unit's weights, and a RESHARD behind the last use.

    A unit without bytes of weights has no action.
    """
    return replace(schedule, actions=tuple(_with_unshards(row, unit_bytes) for row in schedule.actions))


def _with_unshards(row: Sequence[Action], unit_bytes: Sequence[int]) -> tuple[Action, ...]:
    uses = [(at, unit) for at, (unit, kind, _) in enumerate(row) if kind in USES_WEIGHTS and unit_bytes[unit]]
    result: list[Action] = []
    live: Collection[int] = ()
    start = 0
    for number, (at, unit) in enumerate(uses):
        later = (uses[place][1] for place in range(number, len(uses)))
        wanted = dict.fromkeys((unit, next((each for each in later if each != unit), unit)))
        result += [Action(each, Kind.RESHARD) for each in live if each not in wanted]
        result += [Action(each, Kind.UNSHARD) for each in wanted if each not in live]
        end = at + 1
        while end < len(row) and row[end].kind in SENDS:  # others wait for what is sent
            end += 1
        result += row[start:end]
        live, start = wanted, end
    return (*result, *(Action(each, Kind.RESHARD) for each in live), *row[start:])


def insert_reduce_scatters(schedule: Schedule, units: Collection[int]) -> Schedule:
    """Adds a REDUCE_SCATTER behind each B or W of these units."""
    return replace(schedule, actions=tuple(_with_reduce_scatters(row, frozenset(units)) for row in schedule.actions))


def _with_reduce_scatters(row: Sequence[Action], units: Collection[int]) -> tuple[Action, ...]:
    result: list[Action] = []
    due: Action | None = None
    for action in row:
        if due is not None and action.kind not in SENDS | SHARDING:  # others wait for what is sent and gathered
            result.append(due)
            due = None
        result.append(action)
        if action.kind in FINISHING and action.unit in units:
            due = Action(action.unit, Kind.REDUCE_SCATTER, action.micro_batch)
    return (*result, *([] if due is None else [due]))
