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
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, NoReturn

import torch.distributed as dist
from torch import Tensor

NAME = "waiting"  # torch.distributed and megasnn take a name with "nccl" in it for GPUs
LIMIT = 60.0  # seconds that a wait may take
COLLECTIVES = {  # Gloo's method by the name that torch.distributed calls
    "all_gather_single": "_allgather_base",
    "_allgather_base": "_allgather_base",  # before torch 2.13
    "allgather": "allgather",
    "allreduce": "allreduce",
    "all_to_all_single": "alltoall_base",
    "alltoall_base": "alltoall_base",  # before torch 2.13
    "barrier": "barrier",
    "broadcast": "broadcast",
}


class HangError(RuntimeError):
    """Ranks wait for each other; says which of them for what."""


class Operation:
    """Something queued on a device, as torch's Work."""

    def __init__(self, text: str, run: Callable[[], Any], device: Device) -> None:
        self.text, self._run, self._device = text, run, device
        self._error: BaseException | None = None
        self.ended = threading.Event()

    def __call__(self) -> None:
        try:
            self._run()
        except BaseException as error:  # it is the host's, which waits for this
            self._error = error
        self.ended.set()

    def wait(self, timeout: timedelta | None = None) -> bool:
        if not self.ended.wait(self._device.limit):
            self._device.hang(f"waits until it can {self.text}{self._device.behind(self)}")
        if self._error is not None:
            raise self._error
        return True

    def is_completed(self) -> bool:
        return self.ended.is_set()


class _Queue:
    """Works off operations, one after another, in a thread of its own."""

    def __init__(self) -> None:
        self._waiting: queue.SimpleQueue[Operation] = queue.SimpleQueue()
        self.open: list[Operation] = []  # those that have not ended, in order
        threading.Thread(target=self._work, daemon=True).start()

    def put(self, operation: Operation) -> None:
        self.open = [each for each in self.open if not each.is_completed()] + [operation]
        self._waiting.put(operation)

    def _work(self) -> None:
        while True:
            self._waiting.get()()


class Device:
    """Queues that all groups of a process share.

    Args:
        store: of the world. rank: of this process in it.
        limit: seconds that a wait may take.
    Attributes:
        communicators: those that were started, in order.
    """

    def __init__(self, store: dist.Store, rank: int, ranks: int, limit: float) -> None:
        self._store, self.rank, self._ranks, self.limit = store, rank, ranks, limit
        self._queues: dict[str, _Queue] = {}
        self.communicators: list[str] = []

    def put(self, line: str, text: str, run: Callable[[], Any]) -> Operation:
        operation = Operation(text, run, self)
        if line not in self._queues:
            self._queues[line] = _Queue()
        self._queues[line].put(operation)
        return operation

    def synchronize(self, *_: object) -> None:
        """In place of torch.cuda.synchronize."""
        for each in [operation for line in self._queues.values() for operation in line.open]:
            if not each.ended.wait(self.limit):
                self.hang(f"synchronises its device, which is to {each.text}{self.behind(each)}")

    def behind(self, operation: Operation) -> str:
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

    def send(self, tensors: list[Tensor], to: int, tag: int = 0) -> Operation:
        return self._between("send", "to", to, tensors, lambda: self._gloo.send(tensors, to, tag).wait())

    def recv(self, tensors: list[Tensor], source: int, tag: int = 0) -> Operation:
        return self._between("receive", "from", source, tensors, lambda: self._gloo.recv(tensors, source, tag).wait())

    def _between(self, what: str, way: str, peer: int, tensors: list[Tensor], run: Callable[[], Any]) -> Operation:
        communicator = self._start(sorted((self._ranks[self.rank()], self._ranks[peer])))
        return self._device.put(communicator, f"{what} {way} rank {self._ranks[peer]} over {communicator}", run)

    def _collective(self, name: str, *arguments: Any, **options: Any) -> Operation:
        method = getattr(self._gloo, COLLECTIVES[name])
        text = f"{name} over {self._start(self._ranks)}"
        return self._device.put("collectives", text, lambda: method(*arguments, **options).wait())

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
def nccl_like(limit: float = LIMIT) -> Iterator[Device]:
    """Inside, the world is one of this transport; to be entered in a world of Gloo, which is gone then.

    Args:
        limit: see Device.
    """
    store, rank, ranks = dist.distributed_c10d._get_default_store(), dist.get_rank(), dist.get_world_size()
    dist.barrier()  # those that still connect would find it gone
    dist.destroy_process_group()
    store = dist.PrefixStore(NAME, store)
    device = Device(store, rank, ranks, limit)
    dist.Backend.register_backend(NAME, lambda options, _: _Group(device, options), extended_api=True, devices="cpu")
    dist.init_process_group(NAME, store=store, rank=rank, world_size=ranks)
    yield device
    dist.destroy_process_group()
