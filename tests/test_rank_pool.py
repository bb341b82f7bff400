"""The pool itself: results in rank order, an error on one rank reaches the test, the pool works again afterwards."""

import pytest
import torch
import torch.distributed as dist

from tools.benchmark.ranks import RankError


def _sum_of_ranks() -> float:
    value = torch.tensor([float(dist.get_rank())])
    dist.all_reduce(value)
    return value.item()


def _rank_one_raises() -> int:
    if dist.get_rank() == 1:
        raise ValueError("rank one says no")
    return dist.get_rank()


def test_results_come_from_every_rank(ranks):
    assert ranks(4, _sum_of_ranks) == [6.0] * 4


def test_an_error_on_one_rank_is_raised_and_the_pool_recovers(ranks):
    with pytest.raises(RankError, match="rank one says no"):
        ranks(2, _rank_one_raises)
    assert ranks(2, _sum_of_ranks) == [1.0] * 2
