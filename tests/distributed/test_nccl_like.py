"""The transport that waits as NCCL does hangs where NCCL would, and says who waits for whom. What is in order ends
on it: tests/parity/test_transport.py."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist

from tests.nccl_like import Device, nccl_like
from tools.benchmark.ranks import RankError

LIMIT = 1.5  # seconds


def _value() -> torch.Tensor:
    return torch.full((3,), float(dist.get_rank()))


def _both_receive_first(_: Device, up: dist.ProcessGroup, down: dist.ProcessGroup) -> None:
    """Each rank posts a receive, in a group of its own direction, before it sends: Gloo does not mind."""
    rank = dist.get_rank()
    received = dist.irecv(_value(), 1 - rank, group=up if rank else down)
    dist.isend(_value(), 1 - rank, group=down if rank else up).wait()
    received.wait()


def _synchronises_under_a_receive(device: Device, up: dist.ProcessGroup, down: dist.ProcessGroup) -> None:
    rank = dist.get_rank()
    dist.all_reduce(_value())
    for group in (up, down):  # started beforehand
        (dist.isend if rank else dist.irecv)(_value(), 1 - rank, group=group).wait()
    received = dist.irecv(_value(), 1 - rank, group=up if rank else down)
    device.synchronize()
    dist.isend(_value(), 1 - rank, group=down if rank else up).wait()
    received.wait()


def _collectives_in_opposite_order(_: Device, up: dist.ProcessGroup, down: dist.ProcessGroup) -> None:
    for group in (up, down):
        dist.all_reduce(_value(), group=group)
    order = (up, down) if dist.get_rank() else (down, up)
    for work in [dist.all_reduce(_value(), group=group, async_op=True) for group in order]:
        work.wait()


def _run(case: Callable[[Device, dist.ProcessGroup, dist.ProcessGroup], None]) -> None:
    with nccl_like(LIMIT) as device:
        case(device, dist.new_group([0, 1], group_desc="up"), dist.new_group([0, 1], group_desc="down"))


WAITS = {
    _both_receive_first: "rank {} waits for rank {} to start the communicator for messages of ranks 0-1",
    _synchronises_under_a_receive: "rank {} synchronises its device, which is to receive from rank {}",
    _collectives_in_opposite_order: "rank {} waits until it can allreduce over the communicator",
}


@pytest.mark.parametrize("case", WAITS, ids=lambda case: case.__name__.strip("_"))
def test_what_hangs_with_nccl_hangs_here_and_says_who_waits_for_whom(ranks, case) -> None:
    with pytest.raises(RankError) as raised:
        ranks(2, _run, case)
    (sentence, *_) = [line for line in str(raised.value).splitlines() if "HangError: " in line]
    for rank in (0, 1):
        assert re.search(WAITS[case].format(rank, 1 - rank), sentence), sentence
