"""Comparison of replicas by checksums: ranks that hold the same tensor hold the same bits.

A bit that flips in one replica's memory changes no message that the ranks send each other: gradients are summed over
the replicas, and all of them go on from the sum. So nothing else notices it, and it would stay for ever.
"""

from __future__ import annotations

import socket
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import lru_cache

import torch
import torch.distributed as dist
from torch import Tensor

from megasnn.grid import Axis
from megasnn.kernels.layout import flat_in_memory
from megasnn.parallel.agreement import gather
from megasnn.parallel.sharding import ShardedTensor
from megasnn.parallel_state import Group, ParallelState
from megasnn.random import keyed_generator

Key = tuple[str, tuple[tuple[Axis, int], ...]]
"""Global name of a tensor, and which of its parts a rank holds, by axis."""
NAMED = 10  # tensors that an error lists


class ReplicaError(RuntimeError):
    """Replicas differ."""


class ReplicaCheck:
    """Compares tensors of this rank with all other ranks that hold the same.

    Args:
        entries: gives parameters, buffers and optimizer state as they are now; those that ranks share in the same order
            on each of them.
        state: the grid of ranks.

    Attributes:
        agreed: the iteration at which all were last found equal; None before the first time.
    """

    def __init__(self, entries: Callable[[], Sequence[ShardedTensor]], state: ParallelState) -> None:
        self._entries, self._groups, self._world, self._device = (
            entries,
            state.holding_groups,
            state.world,
            state.device,
        )
        self.agreed: int | None = None

    @property
    def compares(self) -> bool:
        """True where there are ranks that hold the same; the same answer on every rank."""
        return any(group.size > 1 for group in self._groups.values())

    def __call__(self, iteration: int) -> None:
        """Compares; collective over all ranks, with one wait for the device.

        Args:
            iteration: steps done, for the message.

        Raises:
            ReplicaError: on every rank, where tensors differ on any: which, on which ranks of which hosts.
        """
        entries = self._entries()
        own = [checksum(entry.tensor).to(self._device, non_blocking=True) for entry in entries]
        sums = torch.stack(own) if own else torch.empty(0, dtype=torch.int64, device=self._device)
        # The largest of all, and the complement of the smallest: one reduction for both.
        bounds = torch.stack([sums, ~sums])
        for axis, group in self._groups.items():
            shared = [index for index, entry in enumerate(entries) if axis in entry.shard.shared_axes]
            bounds[:, shared] = _largest(bounds[:, shared], group)
        differs = bounds[0] != ~bounds[1]
        if _largest(differs.any().long().reshape(1), self._world).item():
            found = {(entries[i].name, entries[i].shard.part): int(sums[i]) for i in differs.nonzero().flatten()}
            raise ReplicaError(self._report(found, iteration))
        self.agreed = iteration

    def _report(self, found: dict[Key, int], iteration: int) -> str:
        """Names the tensors that differ and who holds what; the same text on every rank."""
        holders: dict[Key, dict[int, list[str]]] = defaultdict(lambda: defaultdict(list))
        for rank, (values, host) in enumerate(gather(self._world.handle, (found, socket.gethostname()))):
            for key, value in values.items():
                holders[key][value].append(f"{rank} on {host}")
        before = "not compared before" if self.agreed is None else f"last agreed at iteration {self.agreed}"
        lines = [f"replicas differ at iteration {iteration} ({before}); checksums of {len(holders)} tensor(s):"]
        for (name, part), ranks_of in list(holders.items())[:NAMED]:
            cut = "".join(f", part {index} by {axis} parallelism" for axis, index in part)
            held = (f"{value & (2**64 - 1):016x} on rank {', '.join(ranks)}" for value, ranks in ranks_of.items())
            lines.append(f"  - {name}{cut}: {'; '.join(held)}")
        return "\n".join(lines + [f"  - and {len(holders) - NAMED} more"] * (len(holders) > NAMED))


def _largest(values: Tensor, group: Group) -> Tensor:
    """The largest over a group. Ranks of a pipeline stage without tensors have nothing to reduce."""
    if group.size > 1 and values.numel():
        dist.all_reduce(values, dist.ReduceOp.MAX, group=group.handle)
    return values


WORDS = 1 << 16  # that are multiplied at once: on a CPU the products then stay in its cache
ODD = 0x1E3779B97F4A7C15


def checksum(tensor: Tensor) -> Tensor:
    """The sum over a tensor of any shape and type, as an int64 number (shape []) on its device.

    The bits are read as 32-bit words, in the order in which they lie in memory, in parts of as many. Each word is
    multiplied by an odd random 64-bit number that belongs to its place in the part, and what is summed up so far by an
    odd one before the next part is added, modulo 2^64. An odd number has an inverse there, so that every single flipped
    bit changes the sum. Any other change, such as two swapped elements, goes unseen with a probability of about 2^-32
    at most.
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
