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
from typing import TYPE_CHECKING, Any

from megasnn.child_process import leave_signals_to_the_rank
from megasnn.data.memory import SharedPlaces, new_piece, take

if TYPE_CHECKING:
    from megasnn.data.reading import SlotReader


def main() -> None:
    """Makes copies of this process that read, until the rank is gone."""
    leave_signals_to_the_rank()
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
        new = shape = None
        used: list[int] | Exception
        try:
            used, arrays = reader.read(stretches)
            shape = (len(arrays), *arrays[0].shape) if arrays else None
            if shape is not None:
                size = 4 * prod(shape)
                if not memory.fits(place, size):
                    new = new_piece(place, size)
                    memory.add(place, new)
                _fill(reader, memory.at(place, size), shape, arrays)
        except Exception as error:
            used, shape = _portable(error), None
        connection.send((task, used, shape, new is not None))
        if new is not None:
            send_handle(descriptors, new, None)
            os.close(new)


def _fill(reader: SlotReader, memory: memoryview, shape: tuple[int, ...], arrays: list[Any]) -> None:
    import numpy as np  # here, so that signals are ignored before anything large is imported

    reader.dataset.format.fill(np.frombuffer(memory, np.float32).reshape(shape), arrays)


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
