"""When one rank fails, all ranks end within seconds, and each says why.

Every rank keeps a connection to a hub on rank 0 that carries nothing while all is well. A rank that fails sends its
message there, and the hub (megasnn.process.fault_hub) passes it on to all ranks. A rank that was killed cannot send,
but the operating system closes its connections, and keep-alive probes find a machine that is gone. There is no
heartbeat: a rank that is merely slow is never taken for dead. On every rank a thread waits for messages, prints what it
receives and ends the process, also while the main thread is blocked in a collective.
"""

from __future__ import annotations

import os
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist

from megasnn.process.fault_hub import CONNECT_SECONDS, GONE, Hub, Link, make_room

# A rank that was killed breaks connections of the others' collectives too. Their errors wait for the news of its death.
CAUSE_SECONDS = 0.3
# A launcher stops all ranks once the first one ends. First all others say why they end, then the one that failed
# prints its error and ends, then the others.
FAREWELL_SECONDS = 0.5
LAST_SECONDS = 1.5


class FaultWatch:
    """Context manager around all that this rank does together with others. Nothing happens in a world of one process.

    Entering and leaving wait for all ranks. An error that leaves the block is told to all ranks first; it goes on to
    the caller, who prints it and ends the process with `os._exit`, since nothing that waits for other ranks may run
    any more. When another rank has failed, or is gone, this process prints that and exits with status 1.

    Attributes:
        place: says where this rank is, or None. It is told when another rank is gone: that one cannot say where it was.
    """

    def __init__(self) -> None:
        self.place: Callable[[], str | None] = lambda: None
        started = dist.is_initialized()
        self._rank, self._size = (dist.get_rank(), dist.get_world_size()) if started else (0, 1)
        self._failing = False
        self._answered = threading.Event()

    def __enter__(self) -> FaultWatch:
        if self._size > 1:
            with placed("while starting the watch over all ranks"):
                self._link = _join(self._rank, self._size)
            threading.Thread(target=self._listen, name="megasnn-fault-watch", daemon=True).start()
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if self._size == 1:
            return
        if error is None:
            self._link.send({"done": self._rank})
            self._answered.wait()
            self._link.close()
        else:
            self._failing = True
            time.sleep(CAUSE_SECONDS)
            self._link.send({"failed": self._rank, "why": in_brief(error)})
            self._answered.wait()
            time.sleep(FAREWELL_SECONDS)

    def _listen(self) -> None:
        """The hub sends one message: all are done, or the first failure."""
        message = self._link.receive() or {"failed": 0, "why": GONE}
        own = self._failing and message.get("failed") == self._rank
        if "done" in message or own:
            self._answered.set()
        else:
            place = self.place() if message["why"] == GONE else None
            here = "" if place is None else f"; here: {place}"
            tell_end(self._rank, f"stopping, because of rank {message['failed']}: {message['why']}{here}")
            time.sleep(LAST_SECONDS)
            os._exit(1)


class _Place(str):
    """A note that says where an error arose. Other notes, such as a data worker's traceback, belong to the error."""


@contextmanager
def placed(where: str | Callable[[], str]) -> Iterator[None]:
    """An error that leaves the block, or the function that this decorates, has a note that says where it arose."""
    try:
        yield
    except Exception as error:
        error.add_note(_Place(where if isinstance(where, str) else where()))
        raise


def cause_and_place(error: BaseException) -> tuple[BaseException, str]:
    """An error, and where it arose: what `placed` noted, the innermost first; "" where that is not known.

    The pipeline's executor raises an error of its own from the one of an action, with the `place` of that action.
    """
    place = getattr(error, "place", None)
    if place is not None and error.__cause__ is not None:
        return error.__cause__, place
    return error, ", ".join(note for note in _notes(error) if isinstance(note, _Place))


def in_brief(error: BaseException) -> str:
    """An error as the other ranks print it: its kind and its place. The rank that raised it prints it in full."""
    cause, place = cause_and_place(error)
    return f"{type(cause).__name__} {place}".rstrip()


def in_full(error: BaseException, with_traceback: bool) -> str:
    """Place, kind and message of an error in the last line; above it the traceback, if that is wanted."""
    cause, place = cause_and_place(error)
    text = f"{place}{place and ': '}{type(cause).__name__}: {cause}{_LATE if _is_told_late(cause) else ''}"
    if not with_traceback:
        return text
    others = [f"{note}\n" for note in _notes(cause) if not isinstance(note, _Place)]
    cause.__notes__ = []
    stack = "".join(traceback.format_exception(cause))
    return stack.removesuffix("".join(traceback.format_exception_only(cause))) + "".join(others) + text


_LATE = (
    "\nA GPU computes behind the program, and its error is noticed by whatever comes next: run it again with "
    "CUDA_LAUNCH_BLOCKING=1 in the environment, where the place is that of the action in which the error arose."
)
_TOLD_LATE = "CUDA error", "Triton Error [CUDA]", "cuDNN error"


def _is_told_late(error: BaseException) -> bool:
    """Whether a GPU's work raised it; where that began is over then. Memory that is short is noticed at once."""
    from_gpu = isinstance(error, torch.AcceleratorError) or any(text in str(error) for text in _TOLD_LATE)
    return isinstance(error, RuntimeError) and from_gpu and not isinstance(error, torch.OutOfMemoryError)


def _notes(error: BaseException) -> list[str]:
    return getattr(error, "__notes__", [])


_first = threading.Lock()


def is_ending() -> bool:
    """Whether this process has printed why it ends."""
    return _first.locked()


def tell_end(rank: int, text: str) -> None:
    """Prints why this process ends, once: what follows from the first reason is not printed."""
    if _first.acquire(blocking=False):
        sys.stderr.write(f"[rank {rank}] {text}\n")  # in one piece: all ranks speak at the same time


def _join(rank: int, size: int) -> Link:
    """This rank's connection to the hub, once all ranks have theirs. Rank 0 starts the hub."""
    place = [_start_hub(size) if rank == 0 else None]
    dist.broadcast_object_list(place, src=0)
    if not isinstance(place[0], tuple):
        raise OSError(f"the watch over all ranks cannot start: {place[0] if rank == 0 else 'rank 0 says why'}")
    port, token = place[0]
    host = "localhost" if rank == 0 else os.environ.get("MASTER_ADDR", "localhost")
    try:
        # Where so many connect at once that some are dropped, the system tries again after 1, 2, 4, ... seconds.
        link = Link(socket.create_connection((host, port), timeout=CONNECT_SECONDS))
    except OSError as error:
        raise ConnectionError(
            f"rank {rank} cannot reach rank 0 at {host}:{port} ({error}); MASTER_ADDR must name rank 0's host, and all "
            f"hosts must reach its ports"
        ) from error
    link.send({"rank": rank, "token": token})
    answer = link.receive()
    if answer is None or "failed" in answer:
        raise ConnectionError(f"the watch over all ranks did not start: {answer or f'no answer from {host}:{port}'}")
    link.socket.settimeout(None)
    return link


def _start_hub(size: int) -> tuple[int, str] | str:
    """Port and token of a hub for so many ranks; or why there cannot be one."""
    try:
        make_room(size)
        hub = Hub(size)
    except OSError as error:
        return str(error)
    return hub.port, hub.token
