"""A device that works off what is queued on it, for the transport of nccl_like.py."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, NoReturn

import torch.distributed as dist


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
        self._waiting: queue.SimpleQueue[Operation | None] = queue.SimpleQueue()
        self.open: list[Operation] = []  # those that have not ended, in order
        threading.Thread(target=self._work, daemon=True).start()

    def put(self, operation: Operation) -> None:
        self.open = [each for each in self.open if not each.is_completed()] + [operation]
        self._waiting.put(operation)

    def end(self) -> None:
        """Behind all that is waiting, the thread ends."""
        self._waiting.put(None)

    def _work(self) -> None:
        while (operation := self._waiting.get()) is not None:
            operation()


class Device:
    """What all groups of a process share.

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

    def end_queues(self) -> None:
        """When their communicators are gone."""
        for each in self._queues.values():
            each.end()
        self._queues.clear()

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
