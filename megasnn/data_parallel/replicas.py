"""Ranks that hold the same tensor hold the same bits: compared by checksums, and mended where most of them agree.

A bit that flips in one replica's memory changes no message that the ranks send each other: gradients are summed over
the replicas, and all of them go on from the sum. So nothing else notices it, and it would stay for ever.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from megasnn.comm.group import Group
from megasnn.data_parallel.checksum import checksum, in_memory_order
from megasnn.grid import Axis
from megasnn.sharded_tensors import ShardedTensor

Key = tuple[str, tuple[tuple[Axis, int], ...]]
NAMED = 10  # tensors that an error lists


class ReplicaError(RuntimeError):
    """Replicas differ, and no majority is to say which one is right."""


@dataclass
class Holders:
    """Which ranks hold which value of a tensor that should be the same on all of them.

    Attributes:
        name: the global name.
        part: which of its parts, by axis; empty where every rank holds the whole.
        ranks: global ranks by checksum.
    """

    name: str
    part: tuple[tuple[Axis, int], ...]
    ranks: dict[int, list[int]] = field(default_factory=dict)

    @property
    def majority(self) -> list[int] | None:
        """The ranks that hold what more than half of all hold; None where there is no such value."""
        largest = max(self.ranks.values(), key=len)
        return largest if 2 * len(largest) > sum(map(len, self.ranks.values())) else None

    @property
    def minority(self) -> list[int]:
        """Those that hold something else than the majority; all of them where there is none."""
        majority = self.majority or []
        return sorted(rank for ranks in self.ranks.values() if ranks is not majority for rank in ranks)

    def describe(self, hosts: Sequence[str]) -> str:
        part = "".join(f", part {index} by {axis} parallelism" for axis, index in self.part)
        values = sorted(self.ranks.items(), key=lambda item: -len(item[1]))
        held = "; ".join(f"{_ranks(ranks)} {value & (2**64 - 1):016x}" for value, ranks in values)
        where = ", ".join(f"rank {rank} on {hosts[rank]}" for rank in self.minority[:NAMED])
        odd = "no majority" if self.majority is None else f"in the minority: {where}"
        return f"{self.name}{part}: {held} ({odd})"


class ReplicaCheck:
    """Compares what this rank holds with all other ranks that hold the same.

    Ranks along an axis that a tensor is not cut over hold the same of it. Each tensor has one checksum; equal checksums
    count as equal tensors.

    Args:
        entries: gives parameters, buffers and optimizer state as they are now; those that ranks share in the same order
            on each of them.
        groups: this rank's group along each axis along which ranks can hold the same.
        world: the group of all ranks.
        device: of the messages.
        mends: give the minority the majority's bits instead of raising an error.

    Attributes:
        agreed: the iteration at which all were last found equal; None before the first time.
    """

    def __init__(
        self,
        entries: Callable[[], Sequence[ShardedTensor]],
        groups: Mapping[Axis, Group],
        world: Group,
        device: torch.device,
        mends: bool = False,
    ) -> None:
        self._entries, self._groups, self._world = entries, groups, world
        self._device, self._mends = device, mends
        self.agreed: int | None = None

    @property
    def compares(self) -> bool:
        """Whether there are ranks that hold the same; the same answer on every rank."""
        return any(group.size > 1 for group in self._groups.values())

    def __call__(self, iteration: int) -> str:
        """Compares; collective over all ranks, with one wait for the device.

        Args:
            iteration: steps done, for the messages.
        Returns:
            what was mended, for the log; "" where all was equal.
        Raises:
            ReplicaError: on every rank, where tensors differ and are not to be mended or have no majority.
        """
        entries = self._entries()
        found = self._differing(entries)
        text = ""
        if found is not None:
            differing, hosts = self._gathered(found)
            text = self._report(differing, hosts, iteration)
            if not self._mends or any(holders.majority is None for holders in differing):
                raise ReplicaError(text)
            self._mend(entries, differing)
            if self._differing(entries) is not None:
                raise ReplicaError(f"{text}\nThey differ again right after the majority's values were copied.")
            text += "\nThe minority has taken the majority's values, and the run goes on."
        self.agreed = iteration
        return text

    def _differing(self, entries: Sequence[ShardedTensor]) -> dict[Key, int] | None:
        """Checksums of this rank's tensors that differ somewhere; None where no rank has such a tensor."""
        own = [checksum(entry.tensor).to(self._device, non_blocking=True) for entry in entries]
        sums = torch.stack(own) if own else torch.empty(0, dtype=torch.int64, device=self._device)
        # The largest of all, and the complement of the smallest: one reduction for both.
        bounds = torch.stack([sums, ~sums])
        for axis, group in self._groups.items():
            shared = [index for index, entry in enumerate(entries) if axis in entry.shard.shared_axes]
            values = bounds[:, shared]
            _reduce_max(values, group)
            bounds[:, shared] = values
        differs = bounds[0] != ~bounds[1]
        anywhere = differs.any().long().reshape(1)
        _reduce_max(anywhere, self._world)
        if not anywhere.item():
            return None
        return {_key(entries[index]): int(sums[index]) for index in differs.nonzero().flatten().tolist()}

    def _gathered(self, found: dict[Key, int]) -> tuple[list[Holders], list[str]]:
        """Gathers who holds what of the tensors that differ, in the same order on every rank, and all ranks' hosts."""
        told: list[tuple[dict[Key, int], str]] = [({}, "")] * self._world.size
        dist.all_gather_object(told, (found, socket.gethostname()), group=self._world.handle)
        holders: dict[Key, Holders] = {}
        for rank, (values, _) in enumerate(told):
            for key, value in values.items():
                holders.setdefault(key, Holders(*key)).ranks.setdefault(value, []).append(rank)
        return list(holders.values()), [host for _, host in told]

    def _report(self, differing: Sequence[Holders], hosts: Sequence[str], iteration: int) -> str:
        before = "not compared before" if self.agreed is None else f"last agreed at iteration {self.agreed}"
        lines = [holders.describe(hosts) for holders in differing[:NAMED]]
        lines += [f"and {len(differing) - NAMED} more"] * (len(differing) > NAMED)
        head = f"replicas differ at iteration {iteration} ({before}); checksums of {len(differing)} tensor(s):"
        return "\n".join([head, *(f"  - {line}" for line in lines)])

    def _mend(self, entries: Sequence[ShardedTensor], differing: Sequence[Holders]) -> None:
        """Sends each rank of a minority the tensor of a rank of the majority, one after the other."""
        mine = {_key(entry): entry.tensor for entry in entries}
        for holders in differing:
            majority = holders.majority
            assert majority is not None
            for target in holders.minority:
                if self._world.rank in (majority[0], target):
                    bits = in_memory_order(mine[holders.name, holders.part]).view(torch.uint8)
                    message = bits.to(self._device)
                    if self._world.rank == target:
                        dist.recv(message, majority[0], group=self._world.handle)
                        bits.copy_(message)
                    else:
                        dist.send(message, target, group=self._world.handle)


def _key(entry: ShardedTensor) -> Key:
    """The same on all ranks that hold the same."""
    return entry.name, entry.shard.part


def _reduce_max(values: Tensor, group: Group) -> None:
    """In place. Ranks of a pipeline stage without tensors have nothing to reduce."""
    if group.size > 1 and values.numel():
        dist.all_reduce(values, dist.ReduceOp.MAX, group=group.handle)


def _ranks(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, ranks[:NAMED]))
    more = f" and {len(ranks) - NAMED} more" if len(ranks) > NAMED else ""
    return f"rank(s) {shown}{more} hold"
