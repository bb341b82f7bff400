"""What weights, gradients and the optimizer's state take on a rank, from the descriptions of the tensors.

The sums are those of a run: `GradientBuckets`, `GatheredWeights` and `forecast_memory` come to the same.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from math import prod

from megasnn.config.optimizer import OptimizerConfig
from megasnn.parallel.sharding import nested_bounds
from megasnn.planner.analysis import HeldTensor
from megasnn.planner.layout import Layout

ALIGNMENT = 64  # bytes: each gradient and each gathered weight begins at a multiple
BUCKET_BYTES = 8 << 20  # on a CPU
GPU_BUCKET_BYTES, GPU_SHARE_BYTES = 32 << 20, 4 << 20  # on a GPU: at least, and for each rank


@dataclass(frozen=True)
class States:
    """Bytes of a rank.

    Attributes:
        weights: parameters and buffers that it keeps, and their average. gradients, optimizer: theirs.
        exchanged: what gradients and rows take on their way, where these have owners.
        reduced: bytes of gradients that are summed over ranks that hold the same.
        updated: bytes of the parameters that this rank's optimizer steps. working: what its step takes meanwhile.
    """

    weights: int
    gradients: int
    optimizer: int
    exchanged: int
    reduced: int
    updated: int
    working: int


def states_of(
    chunks: Sequence[Sequence[HeldTensor]], layout: Layout, optimizer: OptimizerConfig, on_gpu: bool
) -> States:
    """Of a rank with these chunks, each of which has its buckets; the rank that owns most rows."""
    grid = layout.grid
    copies = (grid.data, grid.context)
    owners = copies if layout.shards_optimizer and prod(copies) > 1 else (1,)
    tensors = [each for chunk in chunks for each in chunk]
    parameters = [each for each in tensors if each.is_parameter]
    trained = [each for each in parameters if optimizer.lr_scale(each.name)]
    kept = {each.name: _largest_rows(each, (grid.weight,)) for each in parameters}
    owned = {each.name: _largest_rows(each, (grid.weight, *owners)) for each in parameters}
    buffers = sum(_bytes(each) for each in tensors if not each.is_parameter)
    averages = 0 if not optimizer.ema_decay else sum(owned.values()) + buffers
    sums = sum(kept[each.name] for each in trained) * (grid.weight > 1)
    sums += sum(owned[each.name] for each in trained) * (prod(owners) > 1)
    kinds = optimizer.state_kinds()
    state = sum(4 if kind == "step" else owned[each.name] for each in trained for kind in kinds)
    exchanged = 0
    if grid.weight > 1 or prod(owners) > 1:
        buckets = [bucket for chunk in chunks for bucket in buckets_of(chunk, layout, optimizer, on_gpu)]
        exchanged = _exchanged(buckets, grid.weight, owners)
    return States(
        weights=sum(kept.values()) + buffers + averages,
        gradients=sum(map(_aligned, map(_bytes, trained))) + sums,
        optimizer=state,
        exchanged=exchanged,
        reduced=sum(kept[each.name] for each in trained),
        updated=sum(owned[each.name] for each in trained),
        working=optimizer.working_bytes(sum(owned[each.name] for each in trained)),
    )


def buckets_of(
    tensors: Iterable[HeldTensor], layout: Layout, optimizer: OptimizerConfig, on_gpu: bool
) -> list[list[HeldTensor]]:
    """The buckets of a chunk with these tensors."""
    grid = layout.grid
    over = grid.weight if grid.weight > 1 else grid.data * grid.context
    most = max(GPU_BUCKET_BYTES, over * GPU_SHARE_BYTES) if on_gpu else BUCKET_BYTES
    return packed([e for e in tensors if e.is_parameter and optimizer.lr_scale(e.name)], most)


def row_bytes(tensors: Iterable[HeldTensor], *sizes: int) -> int:
    """What the rank with most rows has of these, where ranks along axes of these sizes share them."""
    return sum(_largest_rows(each, sizes) for each in tensors)


def packed(trained: Iterable[HeldTensor], most: int) -> list[list[HeldTensor]]:
    """The buckets of a chunk, filled from the last parameter on; each is closed when it holds so many bytes."""
    groups: list[list[HeldTensor]] = []
    size = most
    for each in reversed(list(trained)):
        if size >= most or groups[-1][0].itemsize != each.itemsize:
            groups.append([])
            size = 0
        groups[-1].append(each)
        size += _bytes(each)
    return groups


def _exchanged(buckets: Sequence[Sequence[HeldTensor]], weight: int, owners: tuple[int, ...]) -> int:
    """What exchanges with those who keep or own rows take at most: the end of one, while the next is on its way."""
    travelling, arrived = list[int](), list[int]()
    for bucket in buckets:
        if weight > 1:
            whole, mine = sum(map(_bytes, bucket)), sum(_largest_rows(each, (weight,)) for each in bucket)
            travelling.append(whole - mine + (weight - 1) * mine)
            arrived.append(2 * mine)
        if prod(owners) > 1:
            whole = sum(_largest_rows(each, (weight,)) for each in bucket)
            mine = sum(_largest_rows(each, (weight, *owners)) for each in bucket)
            travelling.append(whole - mine + (prod(owners) - 1) * mine)
            arrived.append(max(2 * mine, whole - mine))
    later = [*travelling[1:], 0]
    return max((sum(each) for each in zip(travelling, arrived, later, strict=True)), default=0)


def gathered_bytes(tensors: Iterable[HeldTensor]) -> int:
    """What the gathered weights of a unit take."""
    return sum(_aligned(prod(each.shape) * each.travels) for each in tensors if each.is_parameter)


def travelling_bytes(tensors: Iterable[HeldTensor], ranks: int) -> int:
    """What a buffer takes that the weights of a unit can be gathered in."""

    def kind(each: HeldTensor) -> tuple[int, int]:
        return each.itemsize, each.travels

    total = 0
    parameters = sorted((each for each in tensors if each.is_parameter), key=kind)
    for (itemsize, travels), together in groupby(parameters, key=kind):
        counts = [0] * ranks
        for each in together:
            rows = each.shape[0] if each.shape else 1
            bounds = nested_bounds(rows, (ranks,))
            length = prod(each.shape) // max(rows, 1)
            counts = [
                count + (last - first) * length for count, (first, last) in zip(counts, pairwise(bounds), strict=True)
            ]
        copies = 0 if ranks == 2 and itemsize == travels else ranks - 1
        total += max(_aligned((sum(counts) - own) * travels) + _aligned(copies * own * travels) for own in counts)
    return total


def _largest_rows(tensor: HeldTensor, sizes: tuple[int, ...]) -> int:
    """Bytes of the rows of the first rank, which has the most, where ranks along axes of these sizes share them."""
    rows = tensor.shape[0] if tensor.shape else 1
    mine = rows
    for size in sizes:
        mine = -(-mine // size)
    return _bytes(tensor) // max(rows, 1) * mine


def _bytes(tensor: HeldTensor) -> int:
    return prod(tensor.shape) * tensor.itemsize


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT
