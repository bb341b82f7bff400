"""In which order a rank posts and receives what others send it, and when: for every schedule."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Iterator
from dataclasses import replace
from itertools import pairwise, product
from types import SimpleNamespace

import pytest
import torch

from megasnn.comm.codec import Content
from megasnn.comm.communicators import Communicators
from megasnn.comm.group import Group
from megasnn.models.description import Carried
from megasnn.pipeline.p2p import WireOptions
from megasnn.pipeline.transfers import Transfers, linked
from megasnn.schedule import Action, Schedule, generate, plan_schedule
from megasnn.schedule.actions import COMPUTE, SENDS
from megasnn.schedule.refine import refine
from tests.distributed.test_random_schedules import random_schedule
from tests.parity.test_schedules import SCHEDULES

CPU = torch.device("cpu")
ONE = (Carried(0, None, Content.DENSE, "what every message brings"),)


class _Link:
    """The receiving end of a link: what was received, and how many computations after it was posted."""

    def __init__(self) -> None:
        self.computed = 0
        self.posted: list[tuple[Hashable, int]] = []  # ahead, and how many computations were over by then
        self.order: list[Hashable] = []
        self.ahead: list[int] = []
        self._posted: tuple[Hashable, int] | None = None

    @property
    def is_posted(self) -> bool:
        return self._posted is not None

    def post(self, key: Hashable, planned: None) -> None:
        assert self._posted is None
        self._posted = key, self.computed
        self.posted.append(self._posted)

    def receive(self, key: Hashable, here: Callable[[], None], planned: None) -> torch.Tensor:
        here()
        posted, self._posted = self._posted or (key, self.computed), None
        assert posted[0] == key
        self.order.append(key)
        self.ahead.append(self.computed - posted[1])
        return torch.empty(0)


def _links(schedule: Schedule, rank: int, wholes: list[int] | None = None, steps: int = 2) -> dict[int, _Link]:
    """The links of a rank, as the last one of some steps leaves them."""
    group = Group("pipeline", tuple(range(schedule.ranks)), rank)
    state = SimpleNamespace(pipeline=group, downward=group, device=CPU, communicators=Communicators(CPU))
    transfers = Transfers(schedule.placement, state, WireOptions(), wholes)  # type: ignore[arg-type]
    links = dict[int, _Link]()
    for _ in range(steps):
        links = {peer: _Link() for peer in transfers._receivers}
        transfers._receivers = links  # type: ignore[assignment]
        # Every micro-batch has a size of its own, so that it can be told in a key.
        transfers.begin(schedule, range(schedule.micro_batches), lambda action: ONE)
        for position, action in enumerate(schedule.actions[rank]):
            if action.kind in COMPUTE:
                transfers.announce(schedule.actions[rank], position)
                for link in links.values():
                    link.computed += 1
            elif action.kind.is_receive:
                transfers.receive(action)
        transfers.wait()
    return links


def _key(receive: Action) -> Hashable:
    return min(receive.chunk, receive.peer.chunk), 0, receive.micro_batch, True, 0


def _needs(schedule: Schedule, rank: int) -> dict[Action, set[int]]:
    """Of every receive of a rank: the places of all actions of that rank which its send needs, by following each way
    back through the schedule."""
    places = {each: (of, at) for of, actions in enumerate(schedule.actions) for at, each in enumerate(actions)}
    senders = {each.peer: each for actions in schedule.actions for each in actions if each.kind in SENDS}
    found: dict[Action, set[int]] = {}
    for receive in (each for each in schedule.actions[rank] if each.kind.is_receive):
        seen, open_ = set[tuple[int, int]](), [places[senders[receive]]]
        while open_:
            of, at = place = open_.pop()
            if at < 0 or place in seen:
                continue
            seen.add(place)
            action = schedule.actions[of][at]
            open_ += [(of, at - 1)] + ([places[senders[action]]] if action.kind.is_receive else [])
        found[receive] = {at for of, at in seen if of == rank}
    return found


def _check_what_is_posted(schedule: Schedule) -> int:
    """Before a computation, the next tensor of each link is posted that something is received from right behind it,
    unless its send needs that computation. Returns how many were held back."""
    held_back = 0
    for rank in range(schedule.ranks):
        actions, needs = schedule.actions[rank], _needs(schedule, rank)
        posted = {each for link in _links(schedule, rank).values() for each in link.posted}
        coming = {peer: deque(_sent(schedule, peer, rank)) for peer in range(schedule.ranks)}
        starts = [at for at, each in enumerate(actions) if each.kind in COMPUTE]
        for computed, (start, end) in enumerate(pairwise([-1, *starts, len(actions)]), start=-1):
            behind = [each for each in actions[start + 1 : end] if each.kind.is_receive]
            for link in coming.values():
                if start < 0 or not any(each in link for each in behind):
                    continue
                first = link[0]
                assert ((_key(first), computed) in posted) == (start not in needs[first]), (first, start)
                held_back += start in needs[first]
            for each, link in product(behind, coming.values()):
                while each in link:  # and with it what is sent before
                    link.popleft()
    return held_back


def _sent(schedule: Schedule, peer: int, rank: int) -> list[Action]:
    """The receives of what a rank sends to another one, in order."""
    sent = (each.peer for each in schedule.actions[peer] if each.kind in SENDS)
    return [each for each in sent if schedule.placement[each.chunk] == rank]


def _check(schedule: Schedule) -> None:
    for rank in range(schedule.ranks):
        for peer, link in _links(schedule, rank).items():
            assert link.order == [_key(each) for each in _sent(schedule, peer, rank)], (
                "in the order of the sends, all of them"
            )
            assert max(link.ahead, default=0) <= 1, "one computation ahead at most"


@pytest.mark.parametrize("stages", [2, 3, 4, 8])
@pytest.mark.parametrize(("name", "chunks"), SCHEDULES)
def test_receives_are_posted_in_order_and_one_computation_ahead(stages: int, name: str, chunks: int) -> None:
    plan = plan_schedule(name, stages, chunks)
    for micro_batches in (1, 3, 9):
        _check(plan.training(micro_batches))
        _check(plan.evaluation(micro_batches))


@pytest.mark.parametrize("stages", [2, 3, 4, 8])
@pytest.mark.parametrize(("name", "chunks"), SCHEDULES)
def test_nothing_is_posted_before_a_computation_that_its_send_needs(stages: int, name: str, chunks: int) -> None:
    plan, held_back = plan_schedule(name, stages, chunks), 0
    for micro_batches in (1, 3, 5, 9):
        held_back += _check_what_is_posted(plan.training(micro_batches))
        _check_what_is_posted(plan.evaluation(micro_batches))
    assert held_back, "a stage's last forward, and the gradient that only this one brings back"


@pytest.mark.parametrize("ranks_of_pipeline", [2, 3, 4])
def test_of_random_schedules_too(ranks_of_pipeline: int) -> None:
    for seed in range(60):
        _check(random_schedule(seed, ranks_of_pipeline))


def test_a_steady_pipeline_receives_while_it_computes() -> None:
    """Posted only when it is waited for, no message would travel beside a computation."""
    for link in _links(plan_schedule("1f1b", 4, 1).training(12), 2).values():
        assert sum(link.ahead) > len(link.ahead) / 2


def test_nothing_is_posted_early_in_the_first_step() -> None:
    """In it kernels are loaded and memory is taken, which may wait for all that a GPU has to do."""
    for rank in range(4):
        for link in _links(plan_schedule("1f1b", 4, 1).training(12), rank, steps=1).values():
            assert link.order and not link.posted


def test_steps_of_another_kind_post_nothing_early_either() -> None:
    """More micro-batches and wider messages take new memory; CUDA graphs are made in the second step."""
    group = Group("pipeline", (0, 1), 1)
    state = SimpleNamespace(pipeline=group, downward=group, device=CPU, communicators=Communicators(CPU))
    transfers = Transfers((0, 1), state, WireOptions())  # type: ignore[arg-type]

    def posts(micro_batches: int, graphs: bool = False, last: int = 2) -> bool:
        schedule, link = generate("1f1b", 2, micro_batches), _Link()
        transfers._receivers = {0: link}  # type: ignore[dict-item]
        transfers.begin(schedule, [2] * (micro_batches - 1) + [last], lambda action: ONE, graphs)
        for position, action in enumerate(schedule.actions[1]):
            if action.kind in COMPUTE:
                transfers.announce(schedule.actions[1], position)
            elif action.kind.is_receive:
                transfers.receive(action)
        transfers.wait()
        return bool(link.posted)

    assert [posts(4), posts(4), posts(6), posts(6), posts(4)] == [False, True, False, True, True]
    assert [posts(4, last=1), posts(4, last=1)] == [False, True]
    with torch.no_grad():
        assert [posts(4), posts(4)] == [False, True]
    transfers.go_dense(["spikes"])
    assert [posts(4), posts(4)] == [False, True]
    assert [posts(5, graphs=True) for _ in range(3)] == [False, False, True]


def test_links_are_those_of_the_placement() -> None:
    assert linked((0, 1, 2)) == [(0, 1), (1, 2)]
    assert linked((0, 1, 2, 0, 1, 2)) == [(0, 1), (0, 2), (1, 2)]
    assert linked((0, 1, 1, 0)) == [(0, 1)]


@pytest.mark.parametrize("name", ["1f1b", "zb1p", "interleaved", "zbv"])
def test_receives_of_units_are_posted_as_early_as_those_of_chunks(name: str) -> None:
    schedule = generate(name, 2, 4)
    refined, wholes = refine(schedule, [3] * schedule.chunks), [unit // 3 for unit in range(3 * schedule.chunks)]
    for rank in range(2):
        whole, fine = _links(schedule, rank), _links(refined, rank, wholes)
        assert whole.keys() == fine.keys() and any(any(link.ahead) for link in whole.values())
        for peer, link in whole.items():
            assert fine[peer].ahead == [3 * ahead for ahead in link.ahead]


def test_a_schedule_is_read_once_for_all_steps() -> None:
    reads = 0

    class Counted(tuple[Action, ...]):
        def __iter__(self) -> Iterator[Action]:
            nonlocal reads
            reads += 1
            return super().__iter__()

    first = generate("1f1b", 3, 4)
    other = replace(first, actions=tuple(map(Counted, first.actions)))
    group = Group("pipeline", (0, 1, 2), 1)
    state = SimpleNamespace(pipeline=group, downward=group, device=CPU, communicators=Communicators(CPU))
    transfers = Transfers(first.placement, state, WireOptions())  # type: ignore[arg-type]
    coming = []
    for schedule in (first, other, other, other, first):
        transfers.begin(schedule, range(4), lambda action: ONE)
        coming.append({peer: [*actions] for peer, actions in transfers._coming.items()})
        transfers._coming[0].clear()  # as a step does
    assert coming == [coming[0]] * 5 and coming[0][0] and coming[0][2]
    assert 0 < reads <= 2 * 3
