"""Collectives on rows against plain tensor operations: any number of rows, every content, both directions, traffic."""

from __future__ import annotations

from dataclasses import astuple
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor

from megasnn.kernels.spike_codec import Content
from megasnn.parallel import collectives
from megasnn.parallel.collectives import (
    all_gather_into,
    all_reduce_sum,
    gather_columns,
    sum_and_scatter_columns,
)
from megasnn.parallel.traffic import Traffic, traffic
from megasnn.parallel_state import Group
from tests.distributed.whole import everybody, random, spikes

SHAPES = [(1, 1), (3, 5), (7, 8), (13, 3), (64, 16)]  # rows, columns of a rank: mostly no whole bytes


def _values(content: Content, rows: int, columns: int, seed: int, dtype: torch.dtype) -> Tensor:
    if content is Content.SPIKES:
        return spikes(rows, columns, seed=seed, dtype=dtype)
    if content is Content.TERNARY:
        return spikes(rows, columns, seed=seed, dtype=dtype) - spikes(rows, columns, seed=seed + 9, dtype=dtype)
    if content is Content.COUNTS:
        return (random(rows, columns, seed=seed).abs() * 80).floor().clamp(max=255).to(dtype)
    return random(rows, columns, seed=seed, dtype=dtype)


def _rows_and_columns() -> tuple[int, ...]:
    """Gathers of columns, of every content and type; sums in rank order, bit for bit; gathers of any size; traffic."""
    group = everybody()
    for rows, columns in SHAPES:
        for content in Content:
            for dtype in (torch.float32, torch.float64, torch.bfloat16):
                whole = [_values(content, rows, columns, seed, dtype) for seed in range(group.size)]
                full, payloads = gather_columns(whole[group.rank], group, content)
                assert full.dtype == dtype and torch.equal(full, torch.cat(whole, dim=1)), (rows, columns, content)
                bits = {Content.COUNTS: 8, Content.DENSE: 8 * dtype.itemsize}.get(content, 1)
                size = -(-rows * columns * bits // 8) * (2 if content is Content.TERNARY else 1)
                assert sum(each.nbytes for each in payloads) == size * group.size
                is_joined = content is Content.SPIKES and columns % 8 == 0
                assert len(payloads) == (1 if is_joined else group.size)
        for dtype in (torch.float32, torch.float64):
            whole = [random(rows, columns * group.size, seed=seed, dtype=dtype) for seed in range(group.size)]
            whole[group.rank] = whole[group.rank].t().contiguous().t()  # not contiguous, as gradients can be
            expected = whole[0] + whole[1]
            for other in whole[2:]:
                expected = expected + other
            mine = slice(group.rank * columns, (group.rank + 1) * columns)
            assert torch.equal(sum_and_scatter_columns(whole[group.rank], group)(), expected[:, mine])
    whole = [random(group.size, size, seed=size) for size in (5, 0, 70_001)]
    for each in (*whole, (100 * random(group.size, 9, seed=3)).to(torch.int64)):
        assert torch.equal(torch.stack(all_gather_into(torch.empty_like(each), each[group.rank], group)), each)
    return _traffic(group)


def _traffic(group: Group) -> tuple[int, ...]:
    rows, nobody = spikes(7, 5, dtype=torch.float32), Group("tp")
    traffic.reset()
    gather_columns(rows, group, Content.SPIKES)  # not counted: counting is off
    with traffic.counting():
        gather_columns(rows, group, Content.SPIKES)
        gather_columns(rows, group, Content.SPIKES)
        gather_columns(rows, group, Content.DENSE)
        sum_and_scatter_columns(random(3, 4 * group.size), group)()
        all_reduce_sum(torch.ones(5), group)
        gather_columns(rows, nobody, Content.SPIKES)  # nothing travels, nothing is counted
        sum_and_scatter_columns(rows, nobody)()
        all_reduce_sum(rows, nobody)
    calls = {(key.operation, key.phase): each.calls for key, each in traffic.counts.items()}
    assert calls == {("all-gather", "step"): 3, ("reduce-scatter", "step"): 1, ("all-reduce", "step"): 1}
    assert [line.split()[:4] for line in traffic.table().splitlines()[1:]] == [
        ["tp", "all-gather", "step", "3"],
        ["tp", "all-reduce", "step", "1"],
        ["tp", "reduce-scatter", "step", "1"],
    ]
    assert set(traffic.by_group) == {"tp"} and traffic.total() == traffic.by_group["tp"]
    found = astuple(traffic.total())
    traffic.reset()
    assert traffic.total() == Traffic()
    return found


@pytest.mark.parametrize("size", [2, 3, 4])
def test_rows_and_columns(ranks, size) -> None:
    others = size - 1
    for found in ranks(size, _rows_and_columns):
        gathered, scattered, reduced = others * 140, others * 3 * 4 * 8, 2 * others * 20 // size
        alike = gathered + scattered + reduced  # an all-reduce takes a part from each, there and back
        assert found == (5, 2 * others * 5 + alike, 2 * others * 140 + alike)  # 35 spikes: 5 bytes, or 140


def _exchanges_of_another_order() -> list[str]:
    """Refusals of tensors whose values do not lie in order: a strided view, and channels last."""
    group, refused = everybody(), []
    strided = torch.arange(8.0)[::2]
    channels_last = torch.zeros(2, 3, 4, 4).contiguous(memory_format=torch.channels_last)
    for exchange in (
        lambda: all_reduce_sum(strided, group),
        lambda: all_reduce_sum(channels_last, group),
        lambda: collectives.all_gather_into(torch.empty(8), strided, group),
        lambda: collectives.start_exchange(strided, [2, 2], [2, 2], group),
    ):
        with pytest.raises(ValueError, match="contiguous") as error:
            exchange()
        refused.append(str(error.value))
    return refused


def test_tensors_of_another_memory_order_are_refused(ranks) -> None:
    for refused in ranks(2, _exchanges_of_another_order):
        assert "shape [4], strides [2]" in refused[0]
        assert "shape [2, 3, 4, 4], strides [48, 1, 12, 3]" in refused[1]


def test_a_gpu_gathers_into_one_flat_tensor(monkeypatch) -> None:
    """A list of tensors would be filled from it; and Gloo refuses a table. The meta device stands for a GPU."""
    gather = Mock()
    monkeypatch.setattr(collectives, "_ALL_GATHER_SINGLE", gather)
    rows = torch.empty(6, 4, device="meta")
    _, payloads = gather_columns(rows, Group("tp", (0, 1, 2), process_group=Mock()), Content.SPIKES)
    (into, mine), _ = gather.call_args
    assert gather.call_count == gather.return_value.wait.call_count == 1
    assert into.shape == (9,) and mine.shape == (3,) and [each.shape for each in payloads] == [(3,)] * 3
    assert all(each.untyped_storage()._cdata == into.untyped_storage()._cdata for each in payloads)
    all_gather_into(
        torch.empty(2, 1, 3, device="meta"), torch.empty(1, 3, device="meta"), Group("dp", (0, 1), process_group=Mock())
    )
    assert [each.shape for each in gather.call_args[0]] == [(6,), (3,)]
