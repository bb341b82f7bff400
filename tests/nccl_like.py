"""A transport that waits where NCCL waits, over Gloo on the CPU. What would wait for ever ends with a sentence.

Modelled is torch's ProcessGroupNCCL, for groups that are not bound to a device (`device_id`):

- A group has a communicator for its collectives, and one for each pair of its ranks that send to each other without
  batching, for both directions. It is made at its first use, where the host waits for its other ranks.
- A communicator has one queue. An operation begins when those before it have ended, and ends when the other ranks have
  come to theirs.
- A device works off the collectives of all its communicators one after another, as a GPU without room for two does:
  two communicators that are entered in opposite order on two ranks hang.
- Waiting for the device waits for all that is queued on it, receives that are posted included.

The host stands for the stream that computes: what waits for an operation is held up there. A GPU's host runs ahead of
that stream; so whatever hangs on a GPU for one of these reasons hangs here.

Over `Links` (links.py) an operation takes its time, too: it begins when all its ranks have come to it and the ones
before it in its queue have ended, and ends as much later as the links say. So the messages from one rank to another
follow each other. Computing is sleeping then (`Device.compute`), and times are those of the stream: each computation
begins right when the one before it and what was waited for have ended. What the host does between them, what Gloo
needs, and a sleep that ended late are made up for by sleeping less, as far as there is something to sleep.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tests.links import Links
from tests.queued_device import Device, Operation, Timing

NAME = "waiting"  # torch.distributed and megasnn take a name with "nccl" in it for GPUs
LIMIT = 60.0  # seconds that a wait may take
MEETING = 1  # tag of the messages by which two ranks tell each other that they have come


@dataclass(frozen=True)
class _Collective:
    """
    Attributes:
        gloo: the name of Gloo's method.
        seconds: what it takes over links: of these, the number of ranks, this one's place and the arguments.
    """

    gloo: str
    seconds: Callable[..., float]


def _all_to_all(
    links: Links, ranks: int, rank: int, taken: Tensor, given: Tensor, takes: list[int], gives: list[int], *_: Any
) -> float:
    def of_others(tensor: Tensor, parts: list[int]) -> float:
        return tensor.nbytes * (1 - (parts[rank] / max(sum(parts), 1) if parts else 1 / ranks))

    return links.all_to_all(ranks, of_others(given, gives), of_others(taken, takes))


_ALL_TO_ALL = _Collective("alltoall_base", _all_to_all)
COLLECTIVES = {  # by the name that torch.distributed calls
    "allgather": _Collective(
        "allgather", lambda links, ranks, _, into, mine, *__: links.all_gather(ranks, mine[0].nbytes)
    ),
    "allreduce": _Collective(
        "allreduce", lambda links, ranks, _, tensors, *__: links.all_reduce(ranks, tensors[0].nbytes)
    ),
    "all_to_all_single": _ALL_TO_ALL,
    "alltoall_base": _ALL_TO_ALL,  # before torch 2.13
    "barrier": _Collective("barrier", lambda links, ranks, *_: links.barrier(ranks)),
    "broadcast": _Collective(
        "broadcast", lambda links, ranks, _, tensors, *__: links.broadcast(ranks, tensors[0].nbytes)
    ),
}


_ProcessGroup: Any = dist.ProcessGroup  # an operation may be any object that waits; torch's types say its own


class _Group(_ProcessGroup):
    def __init__(self, device: Device, options: Any) -> None:
        super().__init__(options.group_rank, options.group_size)
        self._device, self._id = device, options.group_id
        self._ranks = list(options.global_ranks_in_group) or list(range(options.group_size))
        store = dist.PrefixStore("gloo", options.store)
        patience = timedelta(seconds=10 * device.limit)  # the limit of the waits comes first
        self._gloo: Any = dist.ProcessGroupGloo(store, options.group_rank, options.group_size, patience)
        self._started: set[str] = set()

    @property
    def group_name(self) -> str:
        """What torch.distributed frees a group by; torch's own finds none for a group written in Python."""
        return self._id

    def send(self, tensors: list[Tensor], to: int, tag: int = 0) -> Operation:
        return self._between("send", "to", to, tensors, lambda: self._gloo.send(tensors, to, tag).wait())

    def recv(self, tensors: list[Tensor], source: int, tag: int = 0) -> Operation:
        return self._between("receive", "from", source, tensors, lambda: self._gloo.recv(tensors, source, tag).wait())

    def _between(self, what: str, way: str, peer: int, tensors: list[Tensor], run: Callable[[], Any]) -> Operation:
        communicator = self._start(sorted((self._ranks[self.rank()], self._ranks[peer])))
        size = sum(tensor.nbytes for tensor in tensors)
        text = f"{what} {way} rank {self._ranks[peer]} over {communicator}"
        meet = partial(self._meet_one, peer)
        return self._queued(communicator, what, text, run, meet, lambda links: links.message(size))

    def _collective(self, name: str, *arguments: Any, **options: Any) -> Operation:
        text = f"{name} over {self._start(self._ranks)}"
        collective = COLLECTIVES[name]
        method = getattr(self._gloo, collective.gloo)
        return self._queued(
            "collectives",
            name,
            text,
            lambda: method(*arguments, **options).wait(),
            self._meet_all,
            lambda links: collective.seconds(links, self.size(), self.rank(), *arguments),
        )

    def _queued(
        self,
        line: str,
        what: str,
        text: str,
        run: Callable[[], Any],
        meet: Callable[[float], float],
        seconds: Callable[[Links], float],
    ) -> Operation:
        """Queues an operation. meet, seconds: see Timing; over links only."""
        links = self._device.links
        timing = None if links is None else Timing(what, self.group_desc, self._device.doing, meet, seconds(links))
        return self._device.put(line, text, run, timing)

    def _meet_one(self, peer: int, ready: float) -> float:
        """When both this rank and another one were ready. Waits for it."""
        mine, theirs = torch.tensor([ready], dtype=torch.float64), torch.empty(1, dtype=torch.float64)
        sent = self._gloo.send([mine], peer, MEETING)
        self._gloo.recv([theirs], peer, MEETING).wait()
        sent.wait()
        return max(ready, theirs.item())

    def _meet_all(self, ready: float) -> float:
        """The same of all ranks of the group."""
        latest = torch.tensor([ready], dtype=torch.float64)
        options: Any = dist.AllreduceOptions()
        options.reduceOp = dist.ReduceOp.MAX
        self._gloo.allreduce([latest], options).wait()
        return latest.item()

    def _start(self, ranks: Sequence[int]) -> str:
        """The communicator of some ranks; collectives of two have another than messages between them."""
        kind = "collectives" if ranks is self._ranks else "messages"
        group = f"group {self._id} ({self.group_desc})"
        communicator = f"the communicator for {kind} of ranks {'-'.join(map(str, ranks))} in {group}"
        if communicator not in self._started:
            self._started.add(communicator)
            self._device.until_all_are_there(communicator, ranks)
        return communicator

    def shutdown(self) -> None:
        self._gloo = None


def _add_collective(name: str) -> None:
    def collective(self: _Group, *arguments: Any, **options: Any) -> Operation:
        return self._collective(name, *arguments, **options)

    setattr(_Group, name, collective)


for _name in COLLECTIVES:
    _add_collective(_name)


@contextmanager
def nccl_like(limit: float = LIMIT, links: Links | None = None) -> Iterator[Device]:
    """Inside, the world is one of this transport; to be entered in a world of Gloo, which is gone then.

    Args:
        links, limit: see Device.
    """
    store, rank, ranks = dist.distributed_c10d._get_default_store(), dist.get_rank(), dist.get_world_size()
    dist.barrier()  # those that still connect would find it gone
    dist.destroy_process_group()
    store = dist.PrefixStore(NAME, store)
    device = Device(store, rank, ranks, limit, links)
    dist.Backend.register_backend(NAME, lambda options, _: _Group(device, options), extended_api=True, devices="cpu")
    dist.init_process_group(NAME, store=store, rank=rank, world_size=ranks)
    yield device
    dist.destroy_process_group()
