"""Collectives on rows against plain tensor operations: any number of rows, every content, both directions, traffic."""

from __future__ import annotations

from unittest.mock import Mock

import pytest
import torch
from torch import Tensor

from megasnn.kernels.spike_codec import Content
from megasnn.parallel import collectives
from megasnn.parallel.collectives import (
    all_reduce_sum,
    gather_columns,
    sum_and_scatter_columns,
)
from megasnn.parallel.traffic import statistics
from megasnn.parallel_state import Group, alone
from tests.distributed.whole import everybody, random, spikes

PAIR = Group("data", (0, 1))
SHAPES = [(1, 1), (3, 5), (7, 8), (13, 3), (64, 16)]  # rows, columns of a rank: mostly no whole bytes


def _values(content: Content, rows: int, columns: int, seed: int, dtype: torch.dtype) -> Tensor:
    if content is Content.SPIKES:
        return spikes(rows, columns, seed=seed, dtype=dtype)
    if content is Content.COUNTS:
        return (random(rows, columns, seed=seed).abs() * 80).floor().clamp(max=255).to(dtype)
    return random(rows, columns, seed=seed, dtype=dtype)


def _gather(dtypes: list[torch.dtype]) -> None:
    group = everybody()
    for rows, columns in SHAPES:
        for content in Content:
            for dtype in dtypes:
                whole = [_values(content, rows, columns, seed, dtype) for seed in range(group.size)]
                full, payloads = gather_columns(whole[group.rank], group, content)
                assert full.dtype == dtype and torch.equal(full, torch.cat(whole, dim=1)), (rows, columns, content)
                bits = (
                    rows * columns
                    if content is Content.SPIKES
                    else 8 * rows * columns * (1 if content is Content.COUNTS else dtype.itemsize)
                )
                assert len(payloads) == group.size and all(p.nbytes == -(-bits // 8) for p in payloads)


@pytest.mark.parametrize("size", [2, 3, 4])
def test_gather_puts_every_ranks_columns_side_by_side(ranks, size) -> None:
    ranks(size, _gather, [torch.float32, torch.float64, torch.bfloat16])


def test_a_gpu_gathers_into_one_tensor(monkeypatch) -> None:
    """A list of tensors would be filled from it. The meta device stands for a GPU."""
    gather = Mock()
    monkeypatch.setattr(collectives, "_ALL_GATHER_SINGLE", gather)
    rows = torch.empty(6, 4, device="meta")
    _, payloads = gather_columns(rows, Group("tensor", (0, 1, 2)), Content.SPIKES)
    (into, mine), _ = gather.call_args
    assert gather.call_count == gather.return_value.wait.call_count == 1
    assert into.shape == (9,) and mine.shape == (3,) and [each.shape for each in payloads] == [(3,)] * 3
    assert all(each.untyped_storage()._cdata == into.untyped_storage()._cdata for each in payloads)


def test_a_table_is_gathered_flat_on_a_gpu(monkeypatch) -> None:
    """Gloo refuses a table for what comes together, where a GPU is used with it."""
    gather = Mock()
    monkeypatch.setattr(collectives, "_ALL_GATHER_SINGLE", gather)
    collectives.all_gather_into(torch.empty(2, 1, 3, device="meta"), torch.empty(1, 3, device="meta"), PAIR)
    (into, mine), _ = gather.call_args
    assert (into.shape, mine.shape) == ((6,), (3,))


def _gathered() -> None:
    """Of several types and sizes, and of nothing."""
    group = everybody()
    whole = [random(group.size, size, seed=size) for size in (5, 0, 70_001)]
    whole.append((100 * random(group.size, 9, seed=3)).to(torch.int64))
    for each in whole:
        parts = collectives.all_gather_into(torch.empty_like(each), each[group.rank], group)
        assert torch.equal(torch.stack(parts), each)


@pytest.mark.parametrize("size", [2, 3])
def test_gathers_of_any_size(ranks, size) -> None:
    ranks(size, _gathered)


def test_what_travels_together_is_sized_for_the_link() -> None:
    few, many = Group("data", (0, 1)), Group("data", tuple(range(64)))
    assert collectives.exchange_bytes(many, torch.device("cpu"), 5) == 5
    assert collectives.exchange_bytes(few, torch.device("cuda"), 5) == 32 << 20
    assert collectives.exchange_bytes(many, torch.device("cuda"), 5) == 64 * (4 << 20)


def _scatter() -> None:
    group = everybody()
    for rows, columns in SHAPES:
        for dtype in (torch.float32, torch.float64):
            whole = [random(rows, columns * group.size, seed=seed, dtype=dtype) for seed in range(group.size)]
            if group.size > 1:  # a tensor that is not contiguous, as gradients can be
                whole[group.rank] = whole[group.rank].t().contiguous().t()
            start = sum_and_scatter_columns(whole[group.rank], group, "backward")
            expected = whole[0] + whole[1]
            for other in whole[2:]:
                expected = expected + other
            mine = slice(group.rank * columns, (group.rank + 1) * columns)
            assert torch.equal(start(), expected[:, mine])  # bit for bit: the order of the sum is that of the ranks


@pytest.mark.parametrize("size", [2, 3, 4])
def test_sum_and_scatter_adds_in_rank_order(ranks, size) -> None:
    ranks(size, _scatter)


def _traffic() -> dict:
    group = everybody()
    rows = spikes(7, 5, dtype=torch.float32)
    statistics.reset()
    gather_columns(rows, group, Content.SPIKES)  # not counted: counting is off
    with statistics.counting():
        gather_columns(rows, group, Content.SPIKES)
        gather_columns(rows, group, Content.SPIKES)
        gather_columns(rows, group, Content.DENSE, "backward")
        sum_and_scatter_columns(random(3, 4 * group.size), group, "backward")()
        all_reduce_sum(torch.ones(5), group, "step")
        gather_columns(rows, alone("tensor"), Content.SPIKES)  # nothing travels, nothing is counted
        sum_and_scatter_columns(rows, alone("tensor"), "forward")()
        all_reduce_sum(rows, alone("tensor"), "step")
    found = {key: (t.calls, t.bytes, t.dense_bytes) for key, t in statistics.read().items()}
    total, other = statistics.total("tensor"), statistics.total("data")
    assert total == statistics.total() and (other.calls, other.bytes) == (0, 0)
    assert (total.calls, total.bytes) == (5, sum(sent for _, sent, _ in found.values()))
    statistics.reset()
    assert statistics.read() == {}
    return found


def test_traffic_is_counted_exactly(ranks) -> None:
    for found in ranks(4, _traffic):
        assert found == {
            ("tensor", "all_gather", "forward"): (2, 2 * 3 * 5, 2 * 3 * 140),  # 35 spikes: 5 bytes, 140 in float32
            ("tensor", "all_gather", "backward"): (1, 3 * 140, 3 * 140),
            ("tensor", "reduce_scatter", "backward"): (1, 3 * 3 * 4 * 8, 3 * 3 * 4 * 8),
            ("tensor", "all_reduce", "step"): (1, 2 * 3 * 5, 2 * 3 * 5),  # a quarter from each, there and back
        }
