"""A rank that fails must end the benchmark with its message, not leave it waiting."""

from __future__ import annotations

import os
import signal
import time

import pytest

from tools.benchmark.ranks import RankError, RankProcesses


class Calm:
    def __init__(self, task: int) -> None:
        if task < 0:
            raise ValueError(f"no such task {task}")
        self.task = task

    def answer(self, add: int) -> int:
        return self.task + add

    def threads(self) -> str | None:
        return os.environ.get("OMP_NUM_THREADS")

    def fail_if_second(self) -> None:
        if self.task == 1:
            raise ArithmeticError("the second one has had enough")
        time.sleep(60)

    def die_if_second(self) -> None:
        if self.task == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(60)

    def unsendable(self) -> object:
        return lambda: None

    def sleep(self) -> None:
        time.sleep(60)


@pytest.fixture
def pair():
    ranks = RankProcesses("row pair", Calm, [0, 1], {"OMP_NUM_THREADS": "3"})
    yield ranks
    ranks.close()


def test_answers_come_in_rank_order_and_the_environment_is_the_ranks_own(pair: RankProcesses) -> None:
    before = os.environ.get("OMP_NUM_THREADS")
    pair.ready(30)
    assert pair.call("answer", 10, timeout=10) == [10, 11]
    assert pair.call("threads", timeout=10) == ["3", "3"]
    assert os.environ.get("OMP_NUM_THREADS") == before


@pytest.mark.parametrize(
    ("method", "told"),
    [("fail_if_second", "rank 1: .*the second one has had enough"), ("die_if_second", "rank 1: killed by signal 9")],
)
def test_a_failing_rank_is_named_while_the_other_is_stuck(pair: RankProcesses, method: str, told: str) -> None:
    pair.ready(30)
    start = time.monotonic()
    with pytest.raises(RankError, match=f"(?s)row pair failed in {method}.*{told}"):
        pair.call(method, timeout=50)
    assert time.monotonic() - start < 10


def test_silence_ends(pair: RankProcesses) -> None:
    pair.ready(30)
    with pytest.raises(RankError, match="rank 0, 1 within 0.5 s"):
        pair.call("sleep", timeout=0.5)


def test_a_rank_that_cannot_be_made_is_told() -> None:
    ranks = RankProcesses("single", Calm, [-1])
    try:
        with pytest.raises(RankError, match="no such task -1"):
            ranks.ready(30)
    finally:
        ranks.close()


def test_a_rank_is_added_and_some_are_called() -> None:
    ranks = RankProcesses("three", Calm, [0, 1])
    try:
        ranks.start([2])
        ranks.ready(30)
        assert len(ranks) == 3 and ranks.call("answer", 0, timeout=10, ranks=2) == [0, 1]
        assert ranks.call("answer", 0, timeout=10) == [0, 1, 2]
    finally:
        ranks.close()


def test_a_result_that_cannot_be_sent_is_told(pair: RankProcesses) -> None:
    pair.ready(30)
    with pytest.raises(RankError, match="(?s)failed in unsendable.*rank 0: .*pickle"):
        pair.call("unsendable", timeout=10)
