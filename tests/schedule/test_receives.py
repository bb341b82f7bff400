"""Which receives a rank posts before which action, in every schedule, and that nobody waits for ever."""

from __future__ import annotations

import random
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain

import pytest

from megasnn.schedule import Action, Schedule, generate, plan_schedule
from megasnn.schedule.actions import COMPUTE, SENDS
from megasnn.schedule.receives import known_arrivals, sent_by_then
from tests.distributed.test_random_schedules import random_schedule
from tests.parity.test_schedules import SCHEDULES

Posts = Mapping[Action, Sequence[Action]]


def schedules(name: str, stages: int, chunks: int) -> Iterator[Schedule]:
    plan = plan_schedule(name, stages, chunks)
    for micro_batches in (1, 3, 5, 9):
        yield plan.training(micro_batches)
        yield plan.evaluation(micro_batches)


class Waiting:
    """A rank that waits for all that is on its way from and to it in each computation, and in receives for what comes.

    Args:
        posts: before an action.
    """

    def __init__(self, schedule: Schedule, rank: int, posts: Posts) -> None:
        self._posts = posts
        self.left, self._sent, self._posted = deque(schedule.actions[rank]), list[Action](), list[Action]()
        self._is_waiting = False

    def goes_on(self, sent: set[Action], posted: set[Action]) -> bool:
        """Does the next thing that it can, of all ranks' receives that are sent and posted; False where it waits."""
        if not self.left:
            return False
        action, is_new = self.left[0], not self._is_waiting
        if is_new:
            self._is_waiting = True
            self._posted += self._posts.get(action, ())
            self._posted += [action] * action.kind.is_receive
            posted.update(self._posted)
        if action.kind in COMPUTE and not (posted.issuperset(self._sent) and sent.issuperset(self._posted)):
            return is_new
        if action.kind.is_receive and action not in sent:
            return is_new
        if action.kind in SENDS:
            sent.add(action.peer)
            self._sent.append(action.peer)
        self.left.popleft()
        self._is_waiting = False
        return True


def ends(schedule: Schedule, with_posts: bool = True) -> bool:
    """Whether all ranks come to their ends, each as fast as chance has it, and post every receive once."""
    posts = [sent_by_then(schedule, rank) if with_posts else {} for rank in range(schedule.ranks)]
    for rank, each in enumerate(posts):
        receives = [action for action in schedule.actions[rank] if action.kind.is_receive]
        assert not with_posts or Counter(receives) == Counter(chain.from_iterable(each.values()))
    for seed in range(3):
        ranks = [Waiting(schedule, rank, each) for rank, each in enumerate(posts)]
        draw, sent, posted = random.Random(seed), set[Action](), set[Action]()
        while any(each.goes_on(sent, posted) for each in draw.sample(ranks, len(ranks))):
            pass
        if any(each.left for each in ranks):
            return False
    return True


@pytest.mark.parametrize("stages", [2, 3, 4])
@pytest.mark.parametrize(("name", "chunks"), SCHEDULES)
def test_with_what_was_sent_for_certain_all_ranks_may_wait_for_their_devices(
    stages: int, name: str, chunks: int
) -> None:
    assert all(ends(schedule) for schedule in schedules(name, stages, chunks))


@pytest.mark.parametrize("ranks_of_pipeline", [2, 3, 4])
def test_of_random_schedules_too(ranks_of_pipeline: int) -> None:
    drawn = [random_schedule(seed, ranks_of_pipeline) for seed in range(60)]
    assert all(ends(each) for each in drawn)
    assert not all(ends(each, with_posts=False) for each in drawn), "sends that nobody has posted are waited for"


def test_who_sends_something_has_received_what_it_was_to_receive_before() -> None:
    schedule = generate("1f1b", 2, 3)
    assert list(known_arrivals(schedule, 0).values()) == [1, 2, 3]
    assert list(known_arrivals(schedule, 1).values()) == [0, 0, 1]
