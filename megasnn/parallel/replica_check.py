"""Comparison of replicas by checksums: ranks that hold the same tensor hold the same bits.

A bit that flips in one replica's memory changes no message that the ranks send each other: gradients are summed over
the replicas, and all of them go on from the sum. So nothing else notices it, and it would stay for ever.
"""

from __future__ import annotations

import socket
from collections import defaultdict
from collections.abc import Sequence
from functools import lru_cache

import torch
import torch.distributed as dist
from torch import Tensor

from megasnn.common.random import keyed_generator
from megasnn.kernels.layout import flat_in_memory
from megasnn.parallel.agreement import gather
from megasnn.parallel.sharding import ShardedTensor
from megasnn.parallel_state import Group, ParallelState

NAMED = 10  # tensors that an error lists


class ReplicaError(RuntimeError):
    """Replicas differ."""


def compare_replicas(entries: Sequence[ShardedTensor], state: ParallelState, iteration: int) -> None:
    """Compares tensors of this rank with all other ranks that hold the same. Collective over all ranks, with one wait
    for the device.

    Args:
        entries: parameters, buffers and optimizer state; those that ranks share in the same order on each of them.
        iteration: steps done, for the message.

    Raises:
        ReplicaError: on every rank, where tensors differ on any: which, on which ranks of which hosts.
    """
    own = [tensor_checksum(entry.tensor).to(state.device, non_blocking=True) for entry in entries]
    sums = torch.stack(own) if own else torch.empty(0, dtype=torch.int64, device=state.device)
    # The largest of all, and the complement of the smallest: one reduction for both.
    bounds = torch.stack([sums, ~sums])
    for axis, group in state.holding_groups.items():
        shared = [index for index, entry in enumerate(entries) if axis in entry.shard.shared_axes]
        bounds[:, shared] = _largest(bounds[:, shared], group)
    differs = bounds[0] != ~bounds[1]
    if not _largest(differs.any().long().reshape(1), state.world).item():
        return
    found = {_label(entries[i]): int(sums[i]) for i in differs.nonzero().flatten()}
    holders: dict[str, dict[int, list[str]]] = defaultdict(lambda: defaultdict(list))
    for rank, (values, host) in enumerate(gather(state.world.handle, (found, socket.gethostname()))):
        for label, value in values.items():
            holders[label][value].append(f"{rank} on {host}")
    lines = [f"replicas differ at iteration {iteration}; checksums of {len(holders)} tensor(s), {NAMED} at most:"]
    for label, ranks_of in list(holders.items())[:NAMED]:
        held = (f"{value & (2**64 - 1):016x} on rank {', '.join(ranks)}" for value, ranks in ranks_of.items())
        lines.append(f"  - {label}: {'; '.join(held)}")
    raise ReplicaError("\n".join(lines))


def _label(entry: ShardedTensor) -> str:
    """Name of a tensor, and of a part of one where it begins."""
    is_whole = entry.shard.local_shape == entry.shard.global_shape
    return entry.name if is_whole else f"{entry.name} from {list(entry.shard.pieces()[0].global_offset)}"


def _largest(values: Tensor, group: Group) -> Tensor:
    """The largest over a group. Ranks of a pipeline stage without tensors have nothing to reduce."""
    if group.size > 1 and values.numel():
        dist.all_reduce(values, dist.ReduceOp.MAX, group=group.handle)
    return values


WORDS = 1 << 16  # that are multiplied at once: on a CPU the products then stay in its cache
ODD = 0x1E3779B97F4A7C15


def tensor_checksum(tensor: Tensor) -> Tensor:
    """The sum over a tensor of any shape and type, as an int64 number (shape []) on its device.

    The bits are 32-bit words in the order of memory. Each is multiplied by an odd random 64-bit number of its place in
    a part of `WORDS`, and the sum so far by an odd one before the next part is added, modulo 2^64. An odd number has an
    inverse there, so that every single flipped bit changes the sum; any other change, such as two swapped elements,
    goes unseen with a probability of about 2^-32 at most.
    """
    data = flat_in_memory(tensor.detach()).view(torch.uint8)
    if data.numel() % 4 or data.storage_offset() % 4:
        data = torch.nn.functional.pad(data, (0, -data.numel() % 4)).clone()
    keys, total = _keys(data.device), data.new_zeros((), dtype=torch.int64)
    for words in data.view(torch.int32).split(WORDS):
        total = total * ODD + (words * keys[: len(words)]).sum()
    return total


@lru_cache(maxsize=2)
def _keys(device: torch.device) -> Tensor:
    """Odd numbers over the whole range of int64, [WORDS]."""
    generator = keyed_generator("replica checksum", 0)
    least, most = torch.iinfo(torch.int64).min, torch.iinfo(torch.int64).max
    return torch.randint(least, most, (WORDS,), generator=generator, dtype=torch.int64).bitwise_or_(1).to(device)
