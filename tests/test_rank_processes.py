"""Ranks of the benchmark and the tests: answers in rank order; one that fails ends a call with its message."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

from tests.forking import forking
from tools.benchmark.ranks import RankError, RankProcesses


class Calm:
    def __init__(self, task: int) -> None:
        if task < 0:
            raise ValueError(f"no such task {task}")
        self.task = task

    def answer(self, add: int) -> tuple[int, str | None]:
        return self.task + add, os.environ.get("OMP_NUM_THREADS")

    def fail(self, how: str) -> object:
        if how == "unsendable":
            return lambda: None
        if how == "raise" and self.task == 1:
            raise ArithmeticError("the second one has had enough")
        if how == "die" and self.task == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return time.sleep(60)


@pytest.fixture
def pair() -> Iterator[RankProcesses]:
    ranks = RankProcesses("row pair", Calm, [0, 1], {"OMP_NUM_THREADS": "3"}, context=forking())
    ranks.ready(30)
    yield ranks
    ranks.close()


def test_answers_come_in_rank_order_and_the_environment_is_the_ranks_own(pair: RankProcesses) -> None:
    before = os.environ.get("OMP_NUM_THREADS")
    assert pair.call("answer", 10, timeout=10) == [(10, "3"), (11, "3")]
    pair.start([2])
    pair.ready(30)
    assert len(pair) == 3 and pair.call("answer", 0, timeout=10, ranks=2) == [(0, "3"), (1, "3")]
    assert os.environ.get("OMP_NUM_THREADS") == before
    pair.start([-1])
    with pytest.raises(RankError, match="no such task -1"):
        pair.ready(30)


@pytest.mark.parametrize(
    ("how", "seconds", "told"),
    [
        ("raise", 50, "failed in fail.*rank 1: .*the second one has had enough"),
        ("die", 50, "failed in fail.*rank 1: killed by signal 9"),
        ("unsendable", 50, "failed in fail.*rank 0: .*pickle"),
        ("sleep", 0.5, "rank 0, 1 within 0.5 s"),
    ],
)
def test_a_failing_rank_is_named_beside_a_stuck_one(pair: RankProcesses, how: str, seconds: float, told: str) -> None:
    start = time.monotonic()
    with pytest.raises(RankError, match=f"(?s)row pair .*{told}"):
        pair.call("fail", how, timeout=seconds)
    assert time.monotonic() - start < 10


def rank_one_raises() -> None:
    if dist.get_rank() == 1:
        raise ValueError("rank one says no")


def sum_of_ranks() -> float:
    value = torch.tensor([float(dist.get_rank())])
    dist.all_reduce(value)
    return value.item()


def test_an_error_on_one_rank_is_raised_and_the_pool_recovers(ranks) -> None:
    with pytest.raises(RankError, match="rank one says no"):
        ranks(2, rank_one_raises)
    assert ranks(4, sum_of_ranks) == [6.0] * 4
