"""What gradients and rows take on their way to and from their owners: from a model and its cut, before it is built."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import nn

from megasnn.comm.collectives import exchange_bytes
from megasnn.comm.group import Group
from megasnn.data_parallel.buckets import BUCKET_BYTES, BucketedDataParallel
from megasnn.layers.context import BuildContext
from megasnn.models.description import ModelDescription
from megasnn.sharded_tensors import copied_tensors, sharded_tensors


def exchanged_with_owners(
    model: ModelDescription,
    context: BuildContext,
    copies: Group,
    device: torch.device,
    bounds: Sequence[range],
    placement: Sequence[int],
) -> list[int]:
    """Bytes on each pipeline rank, of the replica that needs most; nothing gets memory for that.

    Args:
        copies: the ranks that own rows. device: where the buckets will be.
        bounds: the layers of each chunk. placement: its rank.
    """
    layers = model.named_layers(context)
    # Rows are dealt out nearly evenly: the first rank or the last one has most.
    owners = [replace(copies, rank=rank) for rank in {0, copies.size - 1}]
    return [
        max(_exchanged(mine, layers, bounds, context, each, device) for each in owners)
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
) -> int:
    tensors = []
    for chunk in chunks:
        mine = layers[bounds[chunk].start : bounds[chunk].stop]
        tensors.append((chunk, [*sharded_tensors(mine), *copied_tensors(mine)]))
    most = exchange_bytes(copies, device, BUCKET_BYTES)
    return BucketedDataParallel(tensors, copies, context.tensor, most, rows_have_owners=True).exchanged_bytes
