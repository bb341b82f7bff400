"""Messages over sockets: every rank's values on every rank, of any size, in the order in which they were started."""

from __future__ import annotations

import time

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megasnn.comm import direct
from megasnn.comm.direct import connected
from megasnn.parallel_state import destroy_model_parallel, initialize_model_parallel
from tests.distributed.whole import random

LENGTHS = 1, 1400, 0, 400_000  # the last one fits in no socket's buffer


def _value(rank: int, length: int, dtype: torch.dtype) -> Tensor:
    return (100 * random(length, seed=rank)).to(dtype)


def _gathered(dtype: torch.dtype, late: int) -> list[Tensor]:
    """All lengths twice: one after another, and all started before the first is waited for. One rank is late."""
    over = connected(dist.group.WORLD)
    rank = dist.get_rank()
    found = [over.start_gather(_value(rank, length, dtype))().clone() for length in LENGTHS]
    if rank == late:
        time.sleep(0.05)
    finishes = [over.start_gather(_value(rank, length, dtype)) for length in LENGTHS]
    found += [finish().clone() for finish in finishes]
    over.close()
    return found


@pytest.mark.parametrize("dtype", [torch.float64, torch.uint8], ids=str)
def test_all_ranks_have_the_values_of_all(ranks, dtype) -> None:
    everyone = ranks(3, _gathered, dtype, 1)
    wanted = [torch.stack([_value(rank, length, dtype) for rank in range(3)]) for length in LENGTHS]
    for found in everyone:
        assert all(torch.equal(a, b) for a, b in zip(found, [*wanted, *wanted], strict=True))


def _wrong_order() -> str:
    over = connected(dist.group.WORLD)
    _, second = (over.start_gather(torch.ones(3)) for _ in range(2))
    with pytest.raises(RuntimeError) as raised:
        second()
    dist.barrier()
    over.close()
    return str(raised.value)


def test_another_order_is_refused(ranks) -> None:
    assert all("before one that was started earlier" in text for text in ranks(2, _wrong_order))


def _at_another_place() -> str:
    over = connected(dist.group.WORLD)
    with pytest.raises(ConnectionError) as raised:
        over.start_gather(torch.ones(3 + dist.get_rank()))()
    dist.barrier()
    over.close()
    return str(raised.value)


def test_other_sizes_are_an_error(ranks) -> None:
    first, second = ranks(2, _at_another_place)
    assert "rank 1 sends 16 bytes where rank 0 sends 12" in first
    assert "rank 0 sends 12 bytes where rank 1 sends 16" in second


def _left_alone(closes: bool) -> str:
    over = connected(dist.group.WORLD)
    text = ""
    if dist.get_rank() == 0:
        over._limit = 0.2
        if closes:
            dist.barrier()
        with pytest.raises(OSError) as raised:
            over.start_gather(torch.ones(3))()
        text = f"{raised.type.__name__}: {raised.value}"
    elif closes:
        over.close()
        dist.barrier()
    dist.barrier()
    over.close()
    return text


@pytest.mark.parametrize(
    ("closes", "error"),
    [(True, "ConnectionError: rank 1 is gone"), (False, "TimeoutError: nothing came from rank(s) 1 within")],
)
def test_a_rank_that_is_gone_or_silent_is_an_error(ranks, closes, error) -> None:
    assert ranks(2, _left_alone, closes)[0].startswith(error)


def _on_two_machines() -> bool:
    """What the second rank is told is a path that its machine does not have."""
    told = direct._told_by_all
    direct._told_by_all = lambda group, value: [
        f"/elsewhere{each}" if isinstance(each, str) else each for each in told(group, value)
    ]
    try:
        return connected(dist.group.WORLD) is None
    finally:
        direct._told_by_all = told


def test_ranks_of_several_machines_have_none(ranks) -> None:
    assert all(ranks(3, _on_two_machines))


def _of_a_grid() -> tuple[bool, list[bool], list[bool]]:
    """Whether the tensor group has connections, and whether those of the context group are closed: now, and later."""
    state = initialize_model_parallel(2, context_parallel_size=2)
    sockets = state.context.held.direct._sockets.values()
    now = [each.fileno() == -1 for each in sockets]
    has = state.tensor.held.direct is not None
    destroy_model_parallel()
    return has, now, [each.fileno() == -1 for each in sockets]


def test_ranks_that_share_a_micro_batch_are_connected_while_there_is_a_grid(ranks) -> None:
    assert ranks(4, _of_a_grid) == [(False, [False], [True])] * 4
