"""Starts the communicators of this rank in constructors, in one order on all ranks, and counts them.

A transport for GPUs (NCCL) makes a communicator when it is first used: the host waits there for its other ranks, and
memory of the device is taken. What is then called are kernels, one after another in the communicator's one queue, each
of which occupies a part of the device until the other ranks have come to theirs. This is why no rank waits for ever;
the transport of tests/nccl_like.py waits in the same places, and tests/parity/test_transport.py runs every
schedule on it.

Which there are: one for the collectives of each set of ranks, along tensor, along data, of a model and of the world,
where groups of the same ranks share one; and one for each ordered pair of pipeline ranks of which the first one sends
to the second one, activations or gradients. The two directions of a pair do not share one: with both in one queue, a
receive that is posted before its time would hold up the send that the peer needs to come to its own.

In which order they start: collectives first, in the order of the table in parallel_state.py; then messages, those of
the link that is measured, of ties and of the placement, each by pairs of ranks in ascending order, upward before
downward. It is the same on all ranks. Take the first one that is not started: whatever its ranks come to before it is
started, so all of them come to it. Nothing in a step is a first use.

Why messages arrive: from a to b, a sends in the order of its actions, and b receives in the same order, which it reads
from a's actions; what comes before it is needed is kept (Transfers). When b waits for a message it has received or
posted all before it, which a has sent before. So b waits for a to reach that send and for nothing else, as
`schedule.validate.runs` has it, which refuses an order of actions in which ranks wait for each other. A send holds
nobody up before the end of the step, and then every receive has been reached.

Why collectives end: the ranks of one communicator call it in the same order. Along tensor they run the same actions; in
a model and the world they meet between steps; along data, buckets are reduced in one order (GradientBuckets), and
nothing waits for that before the end of the step, when this rank owes nobody a message.

What else could wait for a posted receive, or for a send that nobody has come to receive: whatever waits for the whole
device. Nothing does inside a step; profiles take events (DeviceClock). A kernel that is loaded or memory that is
fetched may wait too: `Transfers.announce` says when receives are posted, and why then.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist

from megasnn.parallel.group import Group


class Communicators:
    """Those that were started on this rank.

    Args:
        wire: where a tensor lies that is sent to one other rank: the CPU where the transport takes none from a GPU.

    Attributes:
        names: what each is for.
        device_bytes: of the device's memory that they have taken; 0 on a CPU.
    """

    def __init__(self, wire: torch.device) -> None:
        self.wire = wire
        self._started: dict[tuple[object, ...], str] = {}
        self.device_bytes = 0

    @property
    def names(self) -> list[str]:
        return list(self._started.values())

    def start(self, group: Group) -> None:
        """That of a group's collectives. Every rank of the group calls it, in the same order as others."""
        if self._is_new(group, (), group.name):
            with self._counting_memory():
                dist.all_reduce(torch.zeros(1, device=self.wire), group=group.handle)

    def start_messages(self, group: Group, source: int, target: int) -> None:
        """That of messages from one place in a group to another. Both ranks call it, in the same order as others."""
        ranks = group.ranks[source], group.ranks[target]
        if group.rank in (source, target) and self._is_new(group, ranks, f"{group.name} {source} to {target}"):
            message = torch.zeros(1, device=self.wire)
            with self._counting_memory():
                if group.rank == source:
                    dist.send(message, ranks[1], group=group.handle)
                else:
                    dist.recv(message, ranks[0], group=group.handle)

    def describe(self) -> str:
        """For the log."""
        memory = f", {self.device_bytes / 1e6:.0f} MB of the GPU's memory" if self.wire.type == "cuda" else ""
        count = f"{len(self._started)} communicator{'s' * (len(self._started) != 1)}"
        return f"{count} on this rank{memory}: {', '.join(self.names)}"

    def _is_new(self, group: Group, between: tuple[int, ...], name: str) -> bool:
        """Groups of the same ranks may share a handle, and so their communicators."""
        if group.held is None or (group.held, between) in self._started:
            return False
        self._started[group.held, between] = name
        return True

    @contextmanager
    def _counting_memory(self) -> Iterator[None]:
        """Nothing waits for another rank yet: the device may be waited for."""
        before = self._free()
        yield
        self.device_bytes += before - self._free()

    def _free(self) -> int:
        if self.wire.type != "cuda":
            return 0
        torch.cuda.synchronize(self.wire)
        return torch.cuda.mem_get_info(self.wire)[0]
