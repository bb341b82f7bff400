"""Comparison of replicas by checksums: ranks with the same tensor must hold the same bits."""

from __future__ import annotations

import socket
from collections import defaultdict
from collections.abc import Sequence
from functools import lru_cache

import torch
import torch.distributed as dist
from torch import Tensor

from megasnn.common.files import quantity
from megasnn.common.random import keyed_generator
from megasnn.kernels.layout import flat_in_memory
from megasnn.parallel.agreement import gather
from megasnn.parallel.sharding import ShardedTensor
from megasnn.parallel_state import Group, ParallelState

NAMED = 10  # most tensors in an error
WORDS = 1 << 16  # multiplied at once: the products stay in a CPU's cache
ODD = 0x1E3779B97F4A7C15


class ReplicaError(RuntimeError):
    """Replicas differ."""


# Nothing else detects a bit flip in one replica's memory: all replicas continue from the same summed gradients, so the
# difference would stay for ever.
def compare_replicas(entries: Sequence[ShardedTensor], state: ParallelState, iteration: int) -> None:
    """Compares tensors with their other holders. Collective over all ranks; waits once for the device.

    Args:
        entries: parameters, buffers and optimizer state, in the same order on ranks that share them.

    Raises:
        ReplicaError: on every rank, with the differing tensors and each value's ranks and hosts.
    """
    own = [tensor_checksum(entry.tensor).to(state.device, non_blocking=True) for entry in entries]
    sums = torch.stack(own) if own else torch.empty(0, dtype=torch.int64, device=state.device)
    # The complement turns the smallest into the largest: one reduction finds both.
    bounds = torch.stack([sums, ~sums])
    for axis, group in state.holding_groups.items():
        shared = [index for index, entry in enumerate(entries) if axis in entry.shard.shared_axes]
        bounds[:, shared] = _largest(bounds[:, shared], group)
    differs = bounds[0] != ~bounds[1]
    if not _largest(differs.any().long().reshape(1), state.world).item():
        return
    found = {_label(entries[index]): int(sums[index]) for index in differs.nonzero().flatten()}
    ranks_of: dict[str, dict[int, list[str]]] = defaultdict(lambda: defaultdict(list))
    for rank, (checksums, host) in enumerate(gather(state.world.handle, (found, socket.gethostname()))):
        for label, checksum in checksums.items():
            ranks_of[label][checksum].append(f"{rank} on {host}")
    number = quantity(len(ranks_of), "tensor")
    lines = [f"replicas differ at iteration {iteration}; checksums of {number}, {NAMED} at most:"]
    for label, holders in list(ranks_of.items())[:NAMED]:
        values = []
        for checksum, ranks in holders.items():
            # A checksum is signed; its 64 bits are shown.
            values.append(f"{checksum & (2**64 - 1):016x} on rank {', '.join(ranks)}")
        lines.append(f"  - {label}: {'; '.join(values)}")
    raise ReplicaError("\n".join(lines))


def _label(entry: ShardedTensor) -> str:
    """Tensor name; for a shard also its first index."""
    is_whole = entry.shard.local_shape == entry.shard.global_shape
    return entry.name if is_whole else f"{entry.name} from {list(entry.shard.pieces()[0].global_offset)}"


def _largest(values: Tensor, group: Group) -> Tensor:
    # A pipeline stage may have no tensors. Its whole group skips the call.
    if group.size > 1 and values.numel():
        dist.all_reduce(values, dist.ReduceOp.MAX, group=group.handle)
    return values


def tensor_checksum(tensor: Tensor) -> Tensor:
    """Checksum of the bits as an int64 scalar on the tensor's device.

    Detects any single flipped bit. Other changes, such as two swapped elements, go undetected with a probability near
    2^-32.
    """
    data = flat_in_memory(tensor.detach()).view(torch.uint8)
    if data.numel() % 4 or data.storage_offset() % 4:
        data = torch.nn.functional.pad(data, (0, -data.numel() % 4)).clone()
    # 32-bit words in memory order, each times an odd random 64-bit key for its index modulo `WORDS`; the sum so far
    # times `ODD` before each further part, all modulo 2^64. Odd numbers have inverses, so any single flipped bit
    # changes the sum.
    keys = _keys(data.device)
    total = data.new_zeros((), dtype=torch.int64)
    for words in data.view(torch.int32).split(WORDS):
        total = total * ODD + (words * keys[: len(words)]).sum()
    return total


@lru_cache(maxsize=2)
def _keys(device: torch.device) -> Tensor:
    """Odd numbers over int64's range, `[WORDS]`."""
    generator = keyed_generator("replica checksum", 0)
    limits = torch.iinfo(torch.int64)
    keys = torch.randint(limits.min, limits.max, (WORDS,), generator=generator, dtype=torch.int64)
    return keys.bitwise_or_(1).to(device)
