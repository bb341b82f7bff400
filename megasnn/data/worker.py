"""The program of `megasnn.data.processes`, and of its copies: each reads micro-batches for `megasnn.data.workers`.

It imports no torch, which would take seconds and 200 MB.
"""

from __future__ import annotations

import os
import pickle
import signal
import sys
import traceback
from contextlib import suppress
from importlib import import_module
from math import prod
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle, send_handle
from typing import TYPE_CHECKING

from megasnn.child_process import leave_signals_to_the_rank
from megasnn.data.memory import SharedPlaces, new_piece, take
from megasnn.free_memory import keep_free_memory

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from megasnn.data.reading import SlotReader


def main() -> None:
    """Makes copies of this process that read, until the rank is gone."""
    leave_signals_to_the_rank()
    keep_free_memory()
    for name in ("reading", "images", "event_frames"):
        import_module(f"megasnn.data.{name}")
    control = Connection(int(sys.argv[1]))
    workers: set[int] = set()
    with suppress(EOFError, ConnectionError):
        while True:
            order, value = control.recv()
            if order == "start":
                started = _copy(control, value)
                workers.add(started)
                control.send(started)
            else:
                control.send(_end(value) if value in workers else None)
                workers.discard(value)


def _copy(control: Connection, folder: str) -> int:
    """The process id of a new worker, which works in this folder."""
    connection, descriptors, memory = handles = [recv_handle(control) for _ in range(3)]
    if worker := os.fork():
        for handle in handles:
            os.close(handle)
        return worker
    status = 1
    try:
        control.close()
        os.chdir(folder)
        rank = Connection(connection)
        with suppress(EOFError, ConnectionError):
            _serve(rank, Connection(descriptors), take(memory, rank.recv()))
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(status)


def _end(worker: int) -> int:
    """Ends a worker and gives its exit status; until then its process id cannot be given to another process."""
    os.kill(worker, signal.SIGKILL)  # changes nothing where it has ended
    return os.waitstatus_to_exitcode(os.waitpid(worker, 0)[1])


def _serve(connection: Connection, descriptors: Connection, reader: SlotReader) -> None:
    memory = SharedPlaces()
    while True:
        task, place, stretches = connection.recv()
        room = _Room(memory, place)
        used: list[int] | Exception
        try:
            used, values = reader.read(stretches, room)
            shape = None if values is None else values.shape
        except Exception as error:
            used, shape = _portable(error), None
        connection.send((task, used, shape, room.new is not None))
        if room.new is not None:
            send_handle(descriptors, room.new, None)
            os.close(room.new)


class _Room:
    """A place in shared memory for the values of samples.

    Attributes:
        new: a descriptor of the piece that the place lies in, where one had to be made.
    """

    def __init__(self, memory: SharedPlaces, place: int) -> None:
        self._memory, self._place = memory, place
        self.new: int | None = None

    def __call__(self, shape: tuple[int, ...]) -> NDArray[np.float32]:
        import numpy as np  # here, so that signals are ignored before anything large is imported

        size = 4 * prod(shape)
        if not self._memory.fits(self._place, size):
            made = new_piece(self._place, size)
            self._memory.add(self._place, made)
            self.new = made
        return np.frombuffer(self._memory.at(self._place, size), np.float32).reshape(shape)


def _portable(error: Exception) -> Exception:
    """The error, with where it arose, in a form that reaches the rank."""
    place = f"In the data worker {os.getpid()}:\n{traceback.format_exc()}"
    try:
        copy: Exception = pickle.loads(pickle.dumps(error))
    except Exception:
        copy = RuntimeError(f"{type(error).__name__}: {error}")
    copy.add_note(place)
    return copy


if __name__ == "__main__":
    main()
