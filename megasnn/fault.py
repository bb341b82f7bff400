"""When one rank fails, all ranks end within seconds, and each says why.

A rank that fails writes its message to a small store on rank 0 and waits a moment; a thread on every rank looks there a
few times a second, prints what it finds and ends the process, also while the main thread is blocked in a collective.
A rank that was killed cannot write: its heartbeat stops, connections to it break, and torchrun sends SIGTERM to the
others; whatever comes first ends them.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta

import torch.distributed as dist

from megasnn.comm.group import Group

POLL_SECONDS = 0.25
HEARTBEAT_LIMIT_SECONDS = 10.0
MESSAGE_KEY = "failure"


class FaultWatch:
    """Context manager around a distributed run. Does nothing in a world of one process.

    Args:
        world: all ranks.
        exit: ends the process at once; replaced in tests.
    """

    def __init__(self, world: Group, exit: Callable[[int], None] = os._exit) -> None:
        self._world, self._exit = world, exit
        self._done = threading.Event()
        self._store: dist.TCPStore | None = None
        self._thread: threading.Thread | None = None

    def __enter__(self) -> FaultWatch:
        if self._world.size > 1:
            self._store = self._connect()
            self._thread = threading.Thread(target=self._watch, name="megasnn-fault-watch", daemon=True)
            self._thread.start()
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is not None and not isinstance(error, SystemExit):
            self._report(error)
        elif self._world.size > 1:
            # Nobody stops watching before everybody has finished: rank 0 holds the store.
            dist.barrier(group=self._world.handle)
        self._done.set()

    def _connect(self) -> dist.TCPStore:
        host = os.environ.get("MASTER_ADDR", "127.0.0.1")
        place: list[tuple[str, int] | None] = [None]
        if self._world.rank == 0:
            with socket.socket() as probe:
                probe.bind(("", 0))
                place[0] = (host, probe.getsockname()[1])
        hosted = None
        if self._world.rank == 0:
            assert place[0] is not None
            hosted = dist.TCPStore(*place[0], is_master=True, wait_for_workers=False)
        dist.broadcast_object_list(place, src=0, group=self._world.handle)
        assert place[0] is not None
        return hosted or dist.TCPStore(*place[0], is_master=False, timeout=timedelta(seconds=20))

    def _report(self, error: BaseException) -> None:
        """The first failure of the run is kept; those that follow from it are not."""
        if self._store is None:
            return
        try:
            self._store.compare_set(MESSAGE_KEY, "", f"rank {self._world.rank}: {type(error).__name__}: {error}")
            time.sleep(4 * POLL_SECONDS)
        except (RuntimeError, OSError):
            pass  # rank 0 and its store are gone already; the others notice that themselves

    def _watch(self) -> None:
        assert self._store is not None
        beats: dict[int, tuple[int, float]] = {}
        while not self._done.wait(POLL_SECONDS):
            try:
                self._store.add(f"beat{self._world.rank}", 1)
                if self._store.check([MESSAGE_KEY]):
                    return self._end(self._store.get(MESSAGE_KEY).decode())
                silent = self._silent_rank(beats) if self._world.rank == 0 else None
                if silent is not None:
                    self._store.compare_set(MESSAGE_KEY, "", f"rank {silent} stopped answering (killed?)")
            except (RuntimeError, OSError):
                if not self._done.wait(1.0):
                    return self._end("rank 0 is gone (killed?)")

    def _silent_rank(self, beats: dict[int, tuple[int, float]]) -> int | None:
        assert self._store is not None
        now = time.monotonic()
        for rank in range(1, self._world.size):
            count = self._store.add(f"beat{rank}", 0)
            if rank not in beats or beats[rank][0] != count:
                beats[rank] = (count, now)
            elif now - beats[rank][1] > HEARTBEAT_LIMIT_SECONDS and count > 0:
                return rank
        return None

    def _end(self, message: str) -> None:
        # A rank that failed itself is about to print its own error and leave; give it the time.
        if not message.startswith(f"rank {self._world.rank}:"):
            print(f"[rank {self._world.rank}] stopping, because of {message}", file=sys.stderr, flush=True)
        elif self._done.wait(8 * POLL_SECONDS):
            return
        self._exit(1)


def explain_sigterm(rank: int) -> None:
    """Says on SIGTERM why this rank ends, and ends it, even while the main thread is inside a collective."""
    reading, writing = os.pipe()
    os.set_blocking(writing, False)

    def wait_for_signal() -> None:
        if signal.SIGTERM in os.read(reading, 64):
            print(f"[rank {rank}] told to stop (SIGTERM): another rank ended or the job was cancelled", file=sys.stderr)
            sys.stderr.flush()
            os._exit(128 + signal.SIGTERM)

    # The interpreter runs handlers between bytecodes of the main thread only; the wake-up pipe is written at once.
    signal.signal(signal.SIGTERM, lambda *_: None)
    signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    threading.Thread(target=wait_for_signal, name="megasnn-sigterm", daemon=True).start()
