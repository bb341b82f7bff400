"""What gradients and rows take on their way to and from their owners: from a model and its cut, before it is built."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from megasnn.comm.collectives import exchange_bytes
from megasnn.comm.group import Group
from megasnn.layers.context import BuildContext
from megasnn.models.description import ModelDescription
from megasnn.parallel.gradient_buckets import BUCKET_BYTES, GradientBuckets
from megasnn.pipeline.peaks import Travelling, under_way
from megasnn.sharded_tensors import copied_tensors, sharded_tensors


def exchanged_with_owners(
    model: ModelDescription,
    context: BuildContext,
    copies: Group,
    device: torch.device,
    bounds: Sequence[range],
    placement: Sequence[int],
) -> list[Travelling]:
    """On each pipeline rank, of the replica that needs most; nothing gets memory for that.

    Args:
        copies: the ranks that own rows. device: where the buckets will be.
        bounds: the layers of each chunk. placement: its rank.
    """
    layers = model.named_layers(context)
    # Rows are dealt out nearly evenly: the first rank or the last one has most.
    owners = [replace(copies, rank=rank) for rank in {0, copies.size - 1}]
    return [
        max((_exchanged(mine, layers, bounds, context, each, device) for each in owners), key=lambda each: each.behind)
        for mine in _chunks_of_ranks(placement)
    ]


def _chunks_of_ranks(placement: Sequence[int]) -> list[list[int]]:
    return [[chunk for chunk, home in enumerate(placement) if home == rank] for rank in range(max(placement) + 1)]


def _exchanged(
    chunks: Sequence[int],
    layers: Sequence[tuple[str, nn.Module]],
    bounds: Sequence[range],
    context: BuildContext,
    copies: Group,
    device: torch.device,
) -> Travelling:
    tensors = []
    for chunk in chunks:
        mine = layers[bounds[chunk].start : bounds[chunk].stop]
        tensors.append((chunk, [*sharded_tensors(mine), *copied_tensors(mine)]))
    most = exchange_bytes(copies, device, BUCKET_BYTES)
    data_parallel = GradientBuckets(tensors, copies, context.tensor, most, rows_have_owners=True)
    return travelling(data_parallel, ((i, layers[i][1]) for chunk in chunks for i in bounds[chunk]))


def travelling(data_parallel: GradientBuckets, layers: Iterable[tuple[int, nn.Module]]) -> Travelling:
    """What a rank exchanges with those who own rows.

    Args:
        layers: of the rank, each with its place in the model.
    """
    layer_of: dict[Tensor, int] = {parameter: i for i, layer in layers for parameter in layer.parameters()}
    buckets = [(frozenset(layer_of[each] for each in held), size) for held, size in data_parallel.travelling]
    order = sorted(set(layer_of.values()), reverse=True)
    return Travelling(data_parallel.exchanged_bytes, under_way(order, buckets))
