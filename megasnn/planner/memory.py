"""A planned rank's weights, gradients and optimizer state, from the layers' tensor shapes.

A run's tensors take the same bytes, but for their alignment in buckets.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import prod

from megasnn.config.optimizer import OptimizerConfig
from megasnn.parallel.bucket_sizes import Gradient, exchanges_of, peak_exchange_bytes
from megasnn.pipeline.memory_forecast import StateBytes, optimizer_bytes
from megasnn.planner.costs_file import ResidentTensor


@dataclass(frozen=True)
class PlannedStates(StateBytes):
    """Bytes on a rank, and the bytes a step reduces and updates.

    Attributes:
        reduced: gradients summed over ranks with the same shards.
        updated: parameters under the rank's optimizer.
    """

    reduced: int
    updated: int


def states_of(
    chunks: Sequence[Sequence[ResidentTensor]], weight: int, owners: int, optimizer: OptimizerConfig, on_gpu: bool
) -> PlannedStates:
    """Bytes on the rank with the largest shards.

    Args:
        chunks: the rank's tensors by chunk.
        owners: ranks sharing a shard's optimizer state; 1 without `--use-distributed-optimizer`.
    """
    buffers = 0
    whole = 0
    resident: list[int] = []
    owned: list[int] = []
    exchanges: list[int] = []
    # Gradients go to the ranks that share weights first, and are smaller on their way to the owners.
    receivers = weight if weight > 1 else owners
    for tensors in chunks:
        gradients = []
        # Backward finishes the last parameter first.
        for tensor in reversed(tensors):
            if not tensor.is_parameter:
                buffers += _bytes(tensor)
                continue
            rows = tensor.shape[0] if tensor.shape else 1
            gradient = Gradient(_bytes(tensor), rows, tensor.itemsize)
            gradients.append(gradient)
            whole += gradient.size
            resident.append(gradient.shard(weight))
            owned.append(gradient.shard(weight * owners))
        exchanges += exchanges_of(gradients, receivers, on_gpu)
    weights = sum(resident) + buffers
    # The moving average has the parameters that this rank updates, and all buffers.
    if optimizer.ema_decay:
        weights += sum(owned) + buffers
    # Reduced gradients of shards stand beside the whole ones, which replicas still add to.
    buckets = whole
    if weight > 1:
        buckets += sum(resident)
    if owners > 1:
        buckets += sum(owned)
    state, working = optimizer_bytes(owned, optimizer)
    return PlannedStates(
        weights=weights,
        gradients=buckets,
        optimizer=state,
        exchanged=peak_exchange_bytes(exchanges),
        working=working,
        reduced=sum(resident),
        updated=sum(owned),
    )


def gathered_bytes(tensors: Iterable[ResidentTensor]) -> int:
    """Bytes of a segment's gathered weights."""
    return sum(prod(each.shape) * each.travels for each in tensors if each.is_parameter)


def _bytes(tensor: ResidentTensor) -> int:
    return prod(tensor.shape) * tensor.itemsize
