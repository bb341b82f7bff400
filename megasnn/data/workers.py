"""Processes that read micro-batches for a rank, and hand them over in shared memory.

torch's DataLoader does this too. Its workers import torch (seconds and some 200 MB each) or are forked from the rank,
whose memory, sockets and locks they then hold; each batch lies in new memory of /dev/shm, which costs as much as
copying it; a worker that was killed is noticed after up to 5 s. Here memory is used again once its tensors are gone,
and many micro-batches lie in memory that one open file stands for.
"""

from __future__ import annotations

import os
import signal
import socket
import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from math import prod
from multiprocessing import Pipe
from multiprocessing.reduction import recv_handle
from selectors import EVENT_READ, DefaultSelector
from typing import Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from megasnn.data.memory import Places, SharedPlaces, share
from megasnn.data.order import Stretch
from megasnn.data.processes import Template, template
from megasnn.data.reading import SlotReader

AHEAD = 2  # tasks that a worker has at a time: while one result is fetched it is at the next
Result = TypeVar("Result")
Finish = Callable[[list[int], "NDArray[np.float32] | None"], Result]
"""From the samples that were used, and their values where images are read, to what the reader of a batch gets."""


@dataclass(frozen=True)
class _Task(Generic[Result]):
    stretches: Sequence[Stretch]
    finish: Finish[Result]
    future: Future[Result]


class WorkerPool(Generic[Result]):
    """`workers` processes with a reader each. Close it to end them; they also end with this process, however it ends.

    Raises:
        OSError: a process cannot be started.
    """

    def __init__(self, reader: SlotReader, workers: int) -> None:
        self._pending: deque[_Task[Result]] = deque()
        self._lock = threading.Lock()
        self._lost: Exception | None = None
        self._closing = False
        self._workers: list[_Worker[Result]] = []
        descriptor, places = share(reader)
        processes = template()
        try:
            for _ in range(workers):
                self._workers.append(_Worker(processes, descriptor, places))
        finally:
            os.close(descriptor)
        self._thread = threading.Thread(target=self._receive, name="megasnn-data", daemon=True)
        self._thread.start()

    def submit(self, stretches: Sequence[Stretch], finish: Finish[Result]) -> Future[Result]:
        """Has the samples of stretches read. `finish` makes the result, in a thread that must not be kept waiting.

        The future raises what reading raised, or ChildProcessError when a worker has been lost.
        """
        task = _Task(stretches, finish, Future[Result]())
        with self._lock:
            self._pending.append(task)
            self._hand_out()
        return task.future

    def close(self) -> None:
        """Ends the processes at once, also in the middle of a micro-batch. Results stay valid."""
        self._closing = True
        for worker in self._workers:
            worker.end()
        self._thread.join()
        for worker in self._workers:
            worker.close()

    def _hand_out(self) -> None:
        """Gives pending tasks to the workers with the fewest; the caller holds the lock."""
        while self._pending and self._lost is None:
            worker = min(self._workers, key=lambda each: len(each.tasks))
            if len(worker.tasks) >= AHEAD:
                return
            worker.give(self._pending.popleft())
        while self._pending and self._lost is not None:
            self._pending.popleft().future.set_exception(self._lost)

    def _receive(self) -> None:
        with DefaultSelector() as connections:
            for worker in self._workers:
                connections.register(worker.connection, EVENT_READ, worker)
            while True:
                for ready, _ in connections.select():
                    try:
                        done = ready.data.receive()
                    except Exception as error:
                        self._fail(error)
                        return
                    with self._lock:
                        self._hand_out()
                    _resolve(*done)

    def _fail(self, error: Exception) -> None:
        """One lost worker ends all: what it was reading would be missing in the order."""
        if self._closing:
            return
        with self._lock:
            self._lost = error
            for worker in self._workers:
                self._pending.extend(task for task, _ in worker.tasks.values())
            self._hand_out()


class _Worker(Generic[Result]):
    """One process, this end of its connections, and the shared memory that it fills.

    Descriptors have a connection of their own: on macOS their receipt is acknowledged, and an acknowledgement must not
    come among the tasks.

    Attributes:
        tasks: what it has to do, by number, each with the place in memory for its values.
    """

    def __init__(self, processes: Template, descriptor: int, places: Places) -> None:
        self.connection, theirs = Pipe()
        self._descriptors, their_descriptors = Pipe()
        self.tasks: dict[int, tuple[_Task[Result], int]] = {}
        self._memory = SharedPlaces()
        self._free: deque[int] = deque()
        self._given = self._places = 0
        with theirs, their_descriptors:
            self.process = processes.start(theirs, their_descriptors, descriptor)
        self._processes = processes
        self.connection.send(places)

    def give(self, task: _Task[Result]) -> None:
        # Where all places are in use the worker makes a new one, so that the rank may keep as many batches as it likes.
        if not self._free:
            self._free.append(self._places)
            self._places += 1
        place = self._free.popleft()
        self.tasks[self._given] = task, place
        with suppress(OSError):  # it is gone: `receive` finds out
            self.connection.send((self._given, place, task.stretches))
        self._given += 1

    def receive(self) -> tuple[_Task[Result], list[int] | Exception, NDArray[np.float32] | None]:
        """A task that is done, with the samples used or what went wrong, and their values.

        Raises ChildProcessError when the process is gone.
        """
        try:
            number, samples, shape, is_new = self.connection.recv()
            new = recv_handle(self._descriptors) if is_new else None
        except (EOFError, OSError):
            raise self._post_mortem() from None
        task, place = self.tasks[number]
        if new is not None:
            self._memory.add(place, new)
            os.close(new)
        del self.tasks[number]
        if shape is None:
            self._free.append(place)
            return task, samples, None
        values = np.frombuffer(self._memory.at(place, 4 * prod(shape)), np.float32)
        # Tensors made of the values keep this array alive; when the last one is gone the place is free again.
        weakref.finalize(values, self._free.append, place).atexit = False
        return task, samples, values.reshape(shape)

    def end(self) -> int | None:
        """At once, also in the middle of a task; the exit status, as `Template.end` has it."""
        for connection in (self.connection, self._descriptors):
            with socket.fromfd(connection.fileno(), socket.AF_UNIX, socket.SOCK_STREAM) as ours, suppress(OSError):
                ours.shutdown(socket.SHUT_RDWR)  # both ends notice, whatever became of the template
        return self._processes.end(self.process)

    def close(self) -> None:
        self.connection.close()
        self._descriptors.close()

    def _post_mortem(self) -> Exception:
        status = self.end()
        how = "ended" if status is None else f"ended with status {status}"
        if status is not None and status < 0:
            how = f"was killed by {signal.Signals(-status).name}"
        hint = "; has memory run out? Lower --num-workers or --micro-batch-size" if status == -signal.SIGKILL else ""
        return ChildProcessError(f"data worker {self.process} {how}{hint}")


def _resolve(task: _Task[Result], samples: list[int] | Exception, values: NDArray[np.float32] | None) -> None:
    try:
        if isinstance(samples, Exception):
            raise samples
        task.future.set_result(task.finish(samples, values))
    except Exception as error:
        task.future.set_exception(error)
