"""In which order a rank posts and receives what others send it, and when: for every schedule."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise, product
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megasnn.kernels.spike_codec import Content
from megasnn.models.description import Carried
from megasnn.parallel_state import Communicators, Group
from megasnn.pipeline.arrivals import sent_by_then
from megasnn.pipeline.p2p import TensorDescriptor, WireOptions
from megasnn.pipeline.transfers import Transfers, linked
from megasnn.schedule import Action, Schedule, generate, plan_schedule
from megasnn.schedule.actions import COMPUTE, SENDS
from megasnn.schedule.passes import refine
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


def _transfers(placement: Sequence[int], rank: int, wholes: list[int] | None = None, boundaries: Any = None) -> Any:
    """Those of a rank on a grid that has nothing but a pipeline."""
    group = Group("pipeline", tuple(range(max(placement) + 1)), rank)
    state: Any = SimpleNamespace(pipeline=group, downward=group, device=CPU, communicators=Communicators(CPU))
    return Transfers(placement, state, WireOptions(), wholes, boundaries)


def _links(schedule: Schedule, rank: int, wholes: list[int] | None = None, steps: int = 3) -> dict[int, _Link]:
    """The links of a rank, as the last one of some steps leaves them."""
    transfers = _transfers(schedule.placement, rank, wholes)
    links = dict[int, _Link]()
    for _ in range(steps):
        links = {peer: _Link() for peer in transfers._receivers}
        transfers._receivers = links
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
    return min(receive.chunk, receive.peer.chunk), 0, receive.micro_batch, True


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


def test_nothing_that_may_not_be_sent_yet_is_posted_in_the_first_step() -> None:
    """In it kernels are loaded and memory is taken, which may wait for all that a GPU has to do. Without a plan it is
    not known what was sent."""
    for rank in range(4):
        for link in _links(plan_schedule("1f1b", 4, 1).training(12), rank, steps=1).values():
            assert link.order and not link.posted


def test_steps_of_another_kind_post_nothing_early_either() -> None:
    """More micro-batches and wider messages take new memory, and so do CUDA graphs where they are made."""
    transfers = _transfers((0, 1), 1)

    def posts(micro_batches: int, graphs: bool = False, last: int = 2) -> bool:
        schedule, link = generate("1f1b", 2, micro_batches), _Link()
        transfers._receivers = {0: link}
        transfers.begin(schedule, [2] * (micro_batches - 1) + [last], lambda action: ONE, graphs)
        for position, action in enumerate(schedule.actions[1]):
            if action.kind in COMPUTE:
                transfers.announce(schedule.actions[1], position)
            elif action.kind.is_receive:
                transfers.receive(action)
        transfers.wait()
        return bool(link.posted)

    assert [posts(size) for size in (4, 4, 4, 6, 6, 6, 4)] == [False, False, True, False, False, True, True]
    assert [posts(4, last=1) for _ in range(3)] == [False, False, True]
    with torch.no_grad():
        assert [posts(4), posts(4)] == [False, True]
    may = True, False, False, True, False
    assert [posts(5, graphs) for graphs in may] == [False, False, True, False, True]


class _Waiting:
    """A rank that waits for all that is on its way from and to it in each computation, and in receives for what comes.

    Args:
        posts: before an action.
    """

    def __init__(self, schedule: Schedule, rank: int, posts: Mapping[Action, Sequence[Action]]) -> None:
        self._schedule, self._rank, self._posts = schedule, rank, posts
        self._left, self._sent, self._posted = deque(schedule.actions[rank]), list[Action](), list[Action]()
        self._is_waiting = False

    def goes_on(self, sent: set[Action], posted: set[Action]) -> bool:
        """Does the next thing that it can, of all ranks' receives that are sent and posted; False where it waits."""
        if not self._left:
            return False
        action, is_new = self._left[0], not self._is_waiting
        if is_new:
            self._is_waiting = True
            self._posted += self._posts.get(action, ())
            if action.kind.is_receive:
                coming = _sent(self._schedule, self._schedule.placement[action.peer.chunk], self._rank)
                self._posted += coming[: coming.index(action) + 1]
            posted.update(self._posted)
        if action.kind in COMPUTE and not (posted.issuperset(self._sent) and sent.issuperset(self._posted)):
            return is_new
        if action.kind.is_receive and action not in sent:
            return is_new
        if action.kind in SENDS:
            sent.add(action.peer)
            self._sent.append(action.peer)
        self._left.popleft()
        self._is_waiting = False
        return True


def _ends(schedule: Schedule, posts: Sequence[Mapping[Action, Sequence[Action]]], seed: int) -> bool:
    """Whether all ranks come to their ends, each as fast as chance has it."""
    ranks = [_Waiting(schedule, rank, each) for rank, each in enumerate(posts)]
    draw, sent, posted = random.Random(seed), set[Action](), set[Action]()
    while any(each.goes_on(sent, posted) for each in draw.sample(ranks, len(ranks))):
        pass
    return len(sent) == sum(each.kind in SENDS for actions in schedule.actions for each in actions) and not any(
        each._left for each in ranks
    )


def _ends_anyhow(schedule: Schedule, posts: bool) -> bool:
    plan = [sent_by_then(schedule, rank) if posts else {} for rank in range(schedule.ranks)]
    return all(_ends(schedule, plan, seed) for seed in range(3))


@pytest.mark.parametrize("stages", [2, 3, 4])
@pytest.mark.parametrize(("name", "chunks"), SCHEDULES)
def test_what_was_sent_for_certain_is_posted_so_that_all_ranks_may_wait_for_their_devices(
    stages: int, name: str, chunks: int
) -> None:
    plan = plan_schedule(name, stages, chunks)
    for micro_batches in (1, 3, 5, 8):
        for schedule in (plan.training(micro_batches), plan.evaluation(micro_batches)):
            assert _ends_anyhow(schedule, posts=True)


@pytest.mark.parametrize(("name", "most"), [("gpipe", 1), ("1f1b", 2), ("zb1p", 2)])
def test_few_receives_need_room_at_once_where_memory_is_taken(name: str, most: int) -> None:
    schedule, found = plan_schedule(name, 4, 1).training(16), 0
    for rank, actions in enumerate(schedule.actions):
        posts, posted = sent_by_then(schedule, rank), set[Action]()
        for action in actions:
            posted.update(posts.get(action, ()))
            found = max(found, len(posted))
            posted.discard(action)
    assert found == most


@pytest.mark.parametrize("ranks_of_pipeline", [2, 3, 4])
def test_of_random_schedules_ranks_may_wait_too(ranks_of_pipeline: int) -> None:
    schedules = [random_schedule(seed, ranks_of_pipeline) for seed in range(60)]
    assert all(_ends_anyhow(each, posts=True) for each in schedules)
    assert not all(_ends_anyhow(each, posts=False) for each in schedules), "sends that nobody has posted are waited for"


class _Line:
    """The receiving end of a link, on which tensors are posted and received in the order in which they are sent."""

    def __init__(self, sent: Sequence[Action]) -> None:
        self._coming, self.posted = deque(_key(each) for each in sent), list[Hashable]()
        self._open = deque[Hashable]()

    def post(self, key: Hashable, planned: TensorDescriptor | None) -> None:
        assert planned is not None and key == self._coming.popleft()
        self._open.append(key)
        self.posted.append(key)

    def receive(self, key: Hashable, here: Callable[[], None], planned: TensorDescriptor | None) -> torch.Tensor:
        assert key == (self._open or self._coming).popleft()
        return torch.empty(0)


class _Told:
    """Knows of every tensor what it is like but of those of one micro-batch, whose receiver is told."""

    def find(self, sizes: Sequence[int]) -> None:
        pass

    def planned(self, carried: Carried, samples: int) -> TensorDescriptor | None:
        return TensorDescriptor.of(torch.empty(1, 1, 1), Content.DENSE) if samples != 1 else None


@pytest.mark.parametrize(("name", "chunks"), [("interleaved", 2), ("zb2p", 1), ("zbv", 2)])
def test_in_a_first_step_nothing_is_posted_before_a_tensor_that_its_receiver_is_told(name: str, chunks: int) -> None:
    schedule, posted = plan_schedule(name, 3, chunks).training(9), 0
    for rank in range(3):
        transfers = _transfers(schedule.placement, rank, boundaries=_Told())
        lines = {peer: _Line(_sent(schedule, peer, rank)) for peer in transfers._receivers}
        transfers._receivers = lines
        transfers.begin(schedule, range(9), lambda action: ONE)
        for position, action in enumerate(schedule.actions[rank]):
            if action.kind in COMPUTE:
                transfers.announce(schedule.actions[rank], position)
            elif action.kind.is_receive:
                transfers.receive(action)
        posted += sum(len(line.posted) for line in lines.values())
    assert posted


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
    transfers = _transfers(first.placement, 1)
    coming = []
    for schedule in (first, other, other, other, first):
        transfers.begin(schedule, range(4), lambda action: ONE)
        coming.append({peer: [*actions] for peer, actions in transfers._coming.items()})
        transfers._coming[0].clear()  # as a step does
    assert coming == [coming[0]] * 5 and coming[0][0] and coming[0][2]
    assert 0 < reads <= 2 * 3
