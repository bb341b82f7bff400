"""Faults: the text of an error, and the end of all ranks when one fails.

torchrun ends the ranks of a node when one of them ends, and no others. So the rank that fails first writes one key into
the store through which the ranks have found each other, with its place, and a thread of every rank looks for it twice a
second, also while the main thread is blocked in a collective. A rank that is killed writes nothing: the connections of
others to it break, and the first one to notice writes the key. A rank that is stopped is noticed by the timeout.
"""

from __future__ import annotations

import itertools
import json
import os
import socket
import sys
import threading
import time
import traceback
from typing import Any

import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from megasnn.common.checks import context_of_error, other_notes

POLL_SECONDS = 0.5
LAST_SECONDS = 3.0  # before ranks that have read the key end: torchrun reports the first rank that ends
_KEY = "fault"


def in_full(error: BaseException, with_traceback: bool) -> str:
    """Place, kind and message of an error in the last line; above it the traceback, if that is wanted."""
    context = context_of_error(error)
    text = f"{context}{context and ': '}{type(error).__name__}: {error}"
    above = ["Traceback (most recent call last):\n", *traceback.format_tb(error.__traceback__)]
    above += [f"{note}\n" for note in other_notes(error)]
    return "".join([*above, text]) if with_traceback else text


class FaultWatch:
    """Ends this process with status 1 when another rank has failed. The first rank of each other host says why. The
    `store` is that of the ranks, with keys of this watch alone."""

    def __init__(self, store: dist.Store, rank: int) -> None:
        shared: Any = store
        self._store = shared.clone()  # a connection of its own: a store serves one thread at a time, and others wait
        self._rank, self._host = rank, socket.gethostname()
        self._is_over = threading.Event()
        self._is_first: bool | None = None
        self._thread = threading.Thread(target=self._look, name="megasnn-faults", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Ends the watch; another one can be started."""
        global _watch
        self._is_over.set()
        self._thread.join(POLL_SECONDS)  # a thread that asks the store while Python ends would abort the process
        _watch = None

    def claim(self, error: BaseException) -> bool:
        """Tells the other ranks of the first error on this one; False where another rank has failed before.

        All ranks have to read the key before connections break. A rank that is not the first waits before it ends: its
        error often is the broken connection to the rank that failed, and torchrun, which looks ten times a second,
        names the lowest of those that it finds ended."""
        is_new = not self._is_over.is_set()
        self._is_over.set()
        if self._is_first is None:
            what = f"{type(error).__name__} {context_of_error(error)}"
            fault = json.dumps({"rank": self._rank, "host": self._host, "what": what})
            try:
                self._is_first = bool(self._store.compare_set(_KEY, "", fault) == fault.encode())
            except RuntimeError:  # the store is gone with its process
                self._is_first = True
        if is_new:
            time.sleep(2 * POLL_SECONDS if self._is_first else LAST_SECONDS)
        return self._is_first

    def _look(self) -> None:
        while not self._is_over.wait(POLL_SECONDS):
            try:
                if not self._store.check([_KEY]):
                    continue
                fault = json.loads(self._store.get(_KEY))
            except RuntimeError:  # the store is gone with its process: the ranks' connections break, too
                return
            self._is_first = False  # whatever breaks from now on, also the store
            if fault["host"] != self._host and os.environ.get("LOCAL_RANK", "0") == "0":
                why = f"rank {fault['rank']} on {fault['host']}: {fault['what']}"
                sys.stderr.write(f"[rank {self._rank}] stopping, because of {why}\n")
            if not self._is_over.wait(LAST_SECONDS):
                end_process()
            return


_watch: FaultWatch | None = None
_numbers = itertools.count()


def watch_ranks() -> FaultWatch | None:
    """Starts a watch over the ranks that have joined; collective. None for a process alone, and where there is one."""
    global _watch
    if _watch is not None or not dist.is_initialized() or dist.get_world_size() == 1:
        return None
    _watch = FaultWatch(dist.PrefixStore(f"megasnn/watch-{next(_numbers)}", _get_default_store()), dist.get_rank())
    return _watch


def claim_fault(error: BaseException) -> bool:
    """Tells the other ranks, if they are watched, of an error on this one; False where another has failed before."""
    return _watch is None or _watch.claim(error)


def end_process() -> None:
    """Ends this process with status 1, and waits for nothing: other ranks may be gone."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1)
