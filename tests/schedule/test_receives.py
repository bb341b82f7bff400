"""Receives that a rank posts before its actions, in every schedule: no ranks wait for each other for ever."""

from __future__ import annotations

import random
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain

import pytest

from megasnn.schedule import Action, Schedule, generate, plan_schedule
from megasnn.schedule.actions import COMPUTE, RECEIVES, SENDS
from megasnn.schedule.receives import known_arrivals, sent_by_then
from tests.distributed.test_random_schedules import random_schedule
from tests.parity.test_schedules import SCHEDULES

Posts = Mapping[Action, Sequence[Action]]


def all_sizes(name: str, stages: int, chunks: int) -> Iterator[Schedule]:
    plan = plan_schedule(name, stages, chunks)
    for micro_batches in (1, 3, 5, 9):
        yield plan.training(micro_batches)
        yield plan.evaluation(micro_batches)


class Waiting:
    """A rank whose computations wait for all its sends and posted receives, and whose receives wait for their message.

    Args:
        posts: receives to post before each action.
    """

    def __init__(self, schedule: Schedule, rank: int, posts: Posts) -> None:
        self._posts = posts
        self.left = deque(schedule.actions[rank])
        self._sent: list[Action] = []
        self._posted: list[Action] = []
        self._is_waiting = False

    def goes_on(self, sent: set[Action], posted: set[Action]) -> bool:
        """Does the rank's next action if it can; False where it waits.

        Args:
            sent: receives of all ranks whose message was sent.
            posted: receives of all ranks that were posted.
        """
        if not self.left:
            return False
        action = self.left[0]
        is_new = not self._is_waiting
        if is_new:
            self._is_waiting = True
            self._posted += self._posts.get(action, ())
            if action.kind in RECEIVES:
                self._posted.append(action)
            posted.update(self._posted)
        if action.kind in COMPUTE and not (posted.issuperset(self._sent) and sent.issuperset(self._posted)):
            return is_new
        if action.kind in RECEIVES and action not in sent:
            return is_new
        if action.kind in SENDS:
            sent.add(action.peer)
            self._sent.append(action.peer)
        self.left.popleft()
        self._is_waiting = False
        return True


def ends(schedule: Schedule, with_posts: bool = True) -> bool:
    """Whether all ranks finish, at random relative speeds. Every receive must be posted once."""
    posts = [sent_by_then(schedule, rank) if with_posts else {} for rank in range(schedule.ranks)]
    for rank, each in enumerate(posts):
        receives = [action for action in schedule.actions[rank] if action.kind in RECEIVES]
        assert not with_posts or Counter(receives) == Counter(chain.from_iterable(each.values()))
    for seed in range(3):
        ranks = [Waiting(schedule, rank, each) for rank, each in enumerate(posts)]
        draw = random.Random(seed)
        sent: set[Action] = set()
        posted: set[Action] = set()
        while any(each.goes_on(sent, posted) for each in draw.sample(ranks, len(ranks))):
            pass
        if any(each.left for each in ranks):
            return False
    return True


@pytest.mark.parametrize("stages", [2, 3, 4])
@pytest.mark.parametrize(("name", "chunks"), SCHEDULES)
def test_with_posted_receives_all_ranks_may_wait_for_their_devices(stages: int, name: str, chunks: int) -> None:
    assert all(ends(schedule) for schedule in all_sizes(name, stages, chunks))


@pytest.mark.parametrize("ranks_of_pipeline", [2, 3, 4])
def test_of_random_schedules_too(ranks_of_pipeline: int) -> None:
    drawn = [random_schedule(seed, ranks_of_pipeline) for seed in range(60)]
    assert all(ends(each) for each in drawn)
    assert not all(ends(each, with_posts=False) for each in drawn), "sends that nobody has posted are waited for"


def test_a_sender_has_finished_its_earlier_receives() -> None:
    schedule = generate("1f1b", 2, 3)
    assert list(known_arrivals(schedule, 0).values()) == [1, 2, 3]
    assert list(known_arrivals(schedule, 1).values()) == [0, 0, 1]
