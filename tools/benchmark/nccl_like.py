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

import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

from tools.benchmark.links import Links

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


class HangError(RuntimeError):
    """Ranks wait for each other; says which of them for what."""


@dataclass(frozen=True)
class Moved:
    """An operation that links took their time for.

    Attributes:
        what: "send", "receive", or the name of the collective. group: what its group is for.
        begin, end: in seconds of `time.perf_counter`, which the processes of a host share.
    """

    what: str
    group: str
    begin: float
    end: float


@dataclass(frozen=True)
class _Timing:
    """How an operation takes its time over links.

    Attributes:
        what, group: as in Moved.
        meet: (when this rank was ready) -> when all ranks of the operation were, which it waits for.
        seconds: that it takes from then on.
    """

    what: str
    group: str
    meet: Callable[[float], float]
    seconds: float


class _Operation:
    """Something queued on a device, as torch's Work."""

    def __init__(self, line: str, text: str, run: Callable[[], Any], device: Device, timing: _Timing | None) -> None:
        self._line, self.text, self._run, self._device, self._timing = line, text, run, device, timing
        self._asked = self._end = device.reached
        self._error: BaseException | None = None
        self.ended = threading.Event()

    def __call__(self) -> None:
        try:
            if self._timing is None:
                self._run()
            else:
                self._end = self._device.take_time(self._line, self._timing, self._asked, self._run)
        except BaseException as error:  # it is the host's, which waits for this
            self._error = error
        self.ended.set()

    def wait(self, timeout: timedelta | None = None) -> bool:
        if not self.ended.wait(self._device.limit):
            self._device.hang(f"waits until it can {self.text}{self._device.behind(self)}")
        if self._error is not None:
            raise self._error
        self._device.reached = max(self._device.reached, self._end)
        return True

    def is_completed(self) -> bool:
        return self.ended.is_set()


class _Queue:
    """Works off operations, one after another, in a thread of its own."""

    def __init__(self) -> None:
        self._waiting: queue.SimpleQueue[_Operation] = queue.SimpleQueue()
        self.open: list[_Operation] = []  # those that have not ended, in order
        threading.Thread(target=self._work, daemon=True).start()

    def put(self, operation: _Operation) -> None:
        self.open = [each for each in self.open if not each.is_completed()] + [operation]
        self._waiting.put(operation)

    def _work(self) -> None:
        while True:
            self._waiting.get()()


class Device:
    """What all groups of a process share.

    Args:
        store: of the world. rank: of this process in it.
        limit: seconds that a wait may take.
        links: what operations take their time from; None: they end when Gloo has done them.

    Attributes:
        reached: over links, the time that the stream which computes has come to, in seconds of `time.perf_counter`.
        communicators: those that were started, in order.
        moved: over links, what has ended, in the order in which it did.
    """

    def __init__(self, store: dist.Store, rank: int, ranks: int, limit: float, links: Links | None = None) -> None:
        self._store, self.rank, self._ranks, self.limit, self.links = store, rank, ranks, limit, links
        self._queues: dict[str, _Queue] = {}
        self._free: dict[str, float] = {}  # by queue, when the last operation ended
        self.reached = time.perf_counter()
        self.communicators: list[str] = []
        self.moved: list[Moved] = []

    def put(self, line: str, text: str, run: Callable[[], Any], timing: _Timing | None = None) -> _Operation:
        operation = _Operation(line, text, run, self, timing)
        if line not in self._queues:
            self._queues[line] = _Queue()
        self._queues[line].put(operation)
        return operation

    def compute(self, seconds: float) -> None:
        """Sleeps in place of computing, which begins when what came before it has ended."""
        self.reached += seconds
        wait_until(self.reached)

    def take_time(self, line: str, timing: _Timing, asked: float, run: Callable[[], Any]) -> float:
        """Runs an operation over links, and returns when it ended.

        Args:
            asked: when it was queued.
        """
        begin = timing.meet(max(asked, self._free.get(line, asked)))
        run()
        self._free[line] = end = begin + timing.seconds
        wait_until(end)
        self.moved.append(Moved(timing.what, timing.group, begin, end))
        return end

    def synchronize(self, *_: object) -> None:
        """In place of torch.cuda.synchronize."""
        for each in [operation for line in self._queues.values() for operation in line.open]:
            if not each.ended.wait(self.limit):
                self.hang(f"synchronises its device, which is to {each.text}{self.behind(each)}")

    def behind(self, operation: _Operation) -> str:
        """What an operation waits behind."""
        for each in self._queues.values():
            if operation in each.open:
                first = next(each for each in each.open if not each.is_completed())
                return "" if first is operation else f", behind an order to {first.text}"
        return ""

    def until_all_are_there(self, communicator: str, ranks: Sequence[int]) -> None:
        """The host waits until all ranks want a communicator."""
        keys = {rank: f"{communicator} {rank}" for rank in ranks}
        self._store.set(keys[self.rank], "")
        end = time.monotonic() + self.limit
        missing = [rank for rank in ranks if rank != self.rank]
        while missing := [rank for rank in missing if not self._store.check([keys[rank]])]:
            if time.monotonic() > end:
                whom = " and ".join(f"rank {rank}" for rank in missing)
                self.hang(f"waits for {whom} to start {communicator}")
            time.sleep(0.005)
        self.communicators.append(communicator)

    def hang(self, text: str) -> NoReturn:
        """Tells what this rank waits for, with what others have told by then or tell soon."""
        self._store.set(f"hang {self.rank}", f"rank {self.rank} {text}")
        others = [f"hang {rank}" for rank in range(self._ranks)]
        end = time.monotonic() + max(1.0, self.limit / 4)
        while not self._store.check(others) and time.monotonic() < end:
            time.sleep(0.05)
        told = [self._store.get(each).decode() for each in others if self._store.check([each])]
        raise HangError("; ".join(told))


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

    def send(self, tensors: list[Tensor], to: int, tag: int = 0) -> _Operation:
        return self._between("send", "to", to, tensors, lambda: self._gloo.send(tensors, to, tag).wait())

    def recv(self, tensors: list[Tensor], source: int, tag: int = 0) -> _Operation:
        return self._between("receive", "from", source, tensors, lambda: self._gloo.recv(tensors, source, tag).wait())

    def _between(self, what: str, way: str, peer: int, tensors: list[Tensor], run: Callable[[], Any]) -> _Operation:
        communicator = self._start(sorted((self._ranks[self.rank()], self._ranks[peer])))
        size = sum(tensor.nbytes for tensor in tensors)
        text = f"{what} {way} rank {self._ranks[peer]} over {communicator}"
        meet = partial(self._meet_one, peer)
        return self._queued(communicator, what, text, run, meet, lambda links: links.message(size))

    def _collective(self, name: str, *arguments: Any, **options: Any) -> _Operation:
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
    ) -> _Operation:
        """Queues an operation. meet, seconds: see _Timing; over links only."""
        links = self._device.links
        timing = None if links is None else _Timing(what, self.group_desc, meet, seconds(links))
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
    def collective(self: _Group, *arguments: Any, **options: Any) -> _Operation:
        return self._collective(name, *arguments, **options)

    setattr(_Group, name, collective)


for _name in COLLECTIVES:
    _add_collective(_name)


def wait_until(end: float) -> None:
    """Sleeps until `time.perf_counter()` is there."""
    while (left := end - time.perf_counter()) > 0:
        time.sleep(left)


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
