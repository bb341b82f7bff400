"""Gradients in buckets: summed over replicas during backward, whatever is frozen, unused, partial or uneven."""

from __future__ import annotations

import gc
import weakref
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from megasnn.parallel import bucket_sizes, zero
from megasnn.parallel.collectives import Exchange, start_exchange
from megasnn.parallel.gradient_buckets import GradientBuckets
from megasnn.parallel.sharding import Shard, ShardedTensor
from megasnn.parallel.traffic import traffic
from megasnn.parallel_state import Group, destroy_model_parallel, initialize_model_parallel
from tests.distributed.whole import everybody, random

SHAPES = {"a": (5,), "b": (3, 4), "c": (7, 2), "d": (2, 2, 2), "e": ()}


def _parameters(**partial: bool) -> dict[str, ShardedTensor]:
    return {
        name: ShardedTensor(
            name,
            nn.Parameter(random(*shape, seed=seed)),
            Shard(shape, partial_gradient=partial.get(name, False)),
            True,
        )
        for seed, (name, shape) in enumerate(SHAPES.items())
    }


def _loss(parameters: dict[str, ShardedTensor], seed: int, without: str = "") -> Tensor:
    """A micro-batch's loss, with another gradient in every parameter for every seed."""
    used = [e for e in parameters.values() if e.name not in without]
    terms = [(e.tensor * random(*e.tensor.shape, seed=100 * seed + i)).sum() for i, e in enumerate(used)]
    return torch.stack(terms).sum()


def _gradients(seeds: list[int], without: str = "") -> dict[str, Tensor]:
    """Of plain autograd over all micro-batches."""
    parameters = _parameters()
    for seed in seeds:
        _loss(parameters, seed, without).backward()
    return {
        name: torch.zeros_like(e.tensor) if e.tensor.grad is None else e.tensor.grad for name, e in parameters.items()
    }


def _check(parameters: dict[str, ShardedTensor], expected: dict[str, Tensor], *frozen: str) -> None:
    for name, entry in parameters.items():
        if name in frozen:
            assert entry.tensor.grad is None
        else:
            torch.testing.assert_close(entry.tensor.grad, expected[name], rtol=1e-13, atol=1e-13)


def _buckets(bucket_bytes: int, *given: Any, **options: Any) -> GradientBuckets:
    with mock.patch.object(bucket_sizes, "CPU_BUCKET_BYTES", bucket_bytes):
        return GradientBuckets(*given, **options)


def _steps(bucket_bytes: int, without: str) -> tuple[int, int]:
    """Two steps of unevenly many micro-batches. (number of all-reduces of a step, bytes received)"""
    group, parameters = everybody("dp"), _parameters()
    parameters["c"].tensor.requires_grad_(False)
    before = parameters["c"].tensor.clone()
    gradient_buckets = _buckets(bucket_bytes, [(0, list(parameters.values()))], group, Group("tp"))
    storage = {name: e.tensor.grad.data_ptr() for name, e in parameters.items() if name != "c"}
    shares = [[1, 2, 3], [4]] + [[5, 6]] * (group.size - 2)
    for step in range(2):
        traffic.reset()
        mine = [seed + 10 * step for seed in shares[group.rank]]
        with traffic.counting():
            gradient_buckets.zero(len(mine))
            assert all(e.tensor.grad is None or not e.tensor.grad.any() for e in parameters.values())
            for seed in mine:
                _loss(parameters, seed, without).backward()
            reduced_in_backward = traffic.by_group["dp"].calls
            gradient_buckets.reduce(0)
            gradient_buckets.wait()
        _check(parameters, _gradients([seed + 10 * step for share in shares for seed in share], without), "c")
        assert storage == {name: e.tensor.grad.data_ptr() for name, e in parameters.items() if name != "c"}
    assert torch.equal(before, parameters["c"].tensor)
    reduced = traffic.by_group["dp"]
    traffic.reset()
    assert (reduced_in_backward == reduced.calls) == (not without)
    return reduced.calls, reduced.bytes


@pytest.mark.parametrize(("size", "bucket_bytes", "buckets"), [(2, 1, 4), (3, 100, 2), (2, 1 << 20, 1)])
def test_gradients_are_the_sums_over_all_micro_batches(ranks, size, bucket_bytes, buckets) -> None:
    gradients = 8 * (8 + 16 + 8 + 8)  # multiples of 64 bytes
    for calls, received in ranks(size, _steps, bucket_bytes, ""):
        assert calls == buckets and received == pytest.approx(2 * (size - 1) / size * gradients, abs=buckets)


@pytest.mark.parametrize(("device", "buckets"), [("cpu", 5), ("meta", 2)])
def test_buckets_of_a_gpu_are_larger(device: str, buckets: int) -> None:
    """The meta device stands for a GPU."""
    parameters = [nn.Parameter(torch.empty(2 << 20, device=device)) for _ in range(5)]  # 8 MiB each
    entries = [
        ShardedTensor(f"{number}", each, Shard(tuple(each.shape)), True) for number, each in enumerate(parameters)
    ]
    gradient_buckets = GradientBuckets([(0, entries)], Group("dp"), Group("tp"))
    assert len(gradient_buckets._buckets) == buckets


def test_parameters_that_take_no_part_have_a_zero_gradient(ranks) -> None:
    ranks(2, _some_take_no_part)


def _some_take_no_part() -> None:
    _steps(65, "a")
    _steps(65, "e")
    parameters = _parameters()
    gradient_buckets = _buckets(65, [(0, list(parameters.values()))], everybody("dp"), Group("tp"))
    _loss(parameters, 1, "abde").backward()
    gradient_buckets.reduce(0)
    gradient_buckets.wait()
    expected = _gradients([1, 1], "abde")
    assert expected["c"].any() and not any(expected[name].any() for name in "abde")
    _check(parameters, expected)


def _uneven_orders() -> None:
    """Two tensor ranks see different channels of `b` and `e`. Then replicas that finish their chunks in another order,
    and still reduce them in the same one. Then a gradient that is added by hand, and reduced as the last."""
    state = initialize_model_parallel(tp=2)
    try:
        parameters = _parameters(b=True, e=True)
        buckets = _buckets(65, [(0, list(parameters.values()))], state.dp, state.tp)
        buckets.zero()
        _loss(parameters, state.rank).backward()
        buckets.reduce(0)
        buckets.wait()
        everywhere, replicas = _gradients([0, 1, 2, 3]), _gradients(list(state.dp.ranks))
        _check(parameters, {name: (everywhere if name in "be" else replicas)[name] for name in SHAPES})
    finally:
        destroy_model_parallel()
    group, seeds = everybody("dp"), [seed + 10 * rank for rank in range(4) for seed in (1, 2)]
    first, second, empty = _parameters(), _parameters(), list[ShardedTensor]()
    chunks = [(3, list(first.values())), (0, list(second.values())), (5, empty)]
    buckets = _buckets(65, chunks, group, Group("tp"))
    buckets.zero(2)
    for chunk in (second, first) if group.rank else (first, second):
        for seed in (1, 2):
            _loss(chunk, seed + group.rank * 10).backward()
    for finished in (0, 5, 3):
        buckets.reduce(finished)
    buckets.wait()
    for chunk in (first, second):
        _check(chunk, _gradients(seeds))
    parameters = _parameters()
    buckets = _buckets(1 << 20, [(0, list(parameters.values()))], group, Group("tp"))
    buckets.zero(1)
    traffic.reset()
    with traffic.counting():
        _loss(parameters, 1, "b").backward()
        assert traffic.by_group["dp"].calls == 0
        parameters["b"].tensor.grad.add_(1.5)
        buckets.accumulated(parameters["b"].tensor)
    assert traffic.by_group["dp"].calls == 1
    traffic.reset()
    buckets.wait()
    expected = _gradients([1] * 4, "b")
    expected["b"] += 6
    _check(parameters, expected)
    with pytest.raises(ValueError, match="more often"):
        buckets.accumulated(parameters["b"].tensor)


def test_partial_gradients_orders_of_chunks_and_gradients_that_autograd_does_not_see(ranks) -> None:
    ranks(4, _uneven_orders)


def _left_of_exchanges() -> None:
    group, parameters = everybody("dp"), _parameters()
    buckets = _buckets(65, [(0, list(parameters.values()))], group, Group("tp"), zero1=True)
    left = []

    def noted(*args: Any) -> Exchange:
        exchange = start_exchange(*args)
        left.append(weakref.ref(exchange))
        return exchange

    with mock.patch.object(zero, "start_exchange", noted):
        for _ in range(2):
            buckets.zero()
            _loss(parameters, group.rank).backward()
            buckets.reduce(0)
            assert sum(each() is not None for each in left) <= 2, "two at a time"
            buckets.wait()
            expected = sum(torch.cat([each.flatten() for each in _gradients([n]).values()]).sum() for n in range(2))
            owned = sum(buckets.gradient(e.tensor).sum() for e in parameters.values())
            dist.all_reduce(owned)
            assert owned == pytest.approx(expected.item(), rel=1e-12)
    assert len(left) > 4 and not any(each() is not None for each in left)


def test_what_owners_were_sent_is_freed_when_it_is_summed_up(ranks) -> None:
    ranks(2, _left_of_exchanges)


def test_one_replica_reduces_nothing_and_is_freed_with_the_buckets() -> None:
    assert not dist.is_initialized()
    parameters = _parameters()
    buckets = GradientBuckets([(0, list(parameters.values()))], Group("dp"), Group("tp"))
    _loss(parameters, 1).backward()
    buckets.reduce(0)
    buckets.wait()
    _check(parameters, _gradients([1]))
    left = [weakref.ref(entry.tensor) for entry in parameters.values()]
    del parameters, buckets
    gc.collect()
    assert not any(each() is not None for each in left)
