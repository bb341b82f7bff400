"""Faults: the text of an error, and the end of all ranks after the first failure."""

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

# torchrun ends the failed rank's node, not other nodes. The first rank to fail therefore writes a key into the
# rendezvous store. A thread on every rank polls for it, also during a blocked collective. A killed rank writes nothing:
# its peers' connections break, and the first peer to notice writes the key. A stopped rank meets the timeout.
POLL_SECONDS = 0.5
# Delay before other ranks end: torchrun reports the rank that ended first, which must be the one that failed.
LAST_SECONDS = 3.0
_KEY = "fault"


def in_full(error: BaseException, with_traceback: bool) -> str:
    """An error's context, type and message, below its traceback if wanted."""
    context = context_of_error(error)
    text = f"{type(error).__name__}: {error}"
    if context:
        text = f"{context}: {text}"
    if not with_traceback:
        return text
    lines = ["Traceback (most recent call last):\n", *traceback.format_tb(error.__traceback__)]
    lines += [f"{note}\n" for note in other_notes(error)]
    return "".join([*lines, text])


class FaultWatch:
    """Ends this process with status 1 after another rank failed. Each other host's first rank says why.

    Args:
        store: the ranks' store, under this watch's prefix.
    """

    def __init__(self, store: dist.Store, rank: int) -> None:
        # A store serves one thread at a time: the polling thread needs a connection of its own. torch's type stubs do
        # not know `clone`.
        untyped_store: Any = store
        self._store = untyped_store.clone()
        self._rank = rank
        self._host = socket.gethostname()
        self._is_over = threading.Event()
        self._is_first: bool | None = None
        self._thread = threading.Thread(target=self._look, name="megasnn-faults", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """A new watch may be started afterwards."""
        global _watch
        self._is_over.set()
        # A thread inside a store call during Python's shutdown would abort the process.
        self._thread.join(POLL_SECONDS)
        _watch = None

    def claim(self, error: BaseException) -> bool:
        """Announces this rank's error, and waits. False if another rank failed first."""
        is_new = not self._is_over.is_set()
        self._is_over.set()
        if self._is_first is None:
            cause = f"{type(error).__name__} {context_of_error(error)}"
            fault = json.dumps({"rank": self._rank, "host": self._host, "cause": cause})
            try:
                self._is_first = bool(self._store.compare_set(_KEY, "", fault) == fault.encode())
            except RuntimeError:
                # The store's process has ended.
                self._is_first = True
        # All ranks must read the key before connections break. A later error is often the broken connection to the
        # failed rank, and torchrun, polling ten times a second, reports the lowest rank it finds ended.
        if is_new:
            time.sleep(2 * POLL_SECONDS if self._is_first else LAST_SECONDS)
        return self._is_first

    def _look(self) -> None:
        while not self._is_over.wait(POLL_SECONDS):
            try:
                if not self._store.check([_KEY]):
                    continue
                fault = json.loads(self._store.get(_KEY))
            except RuntimeError:
                # The store's process has ended, so the connections between ranks break as well.
                return
            # Later errors on this rank are consequences.
            self._is_first = False
            if fault["host"] != self._host and os.environ.get("LOCAL_RANK", "0") == "0":
                cause = f"rank {fault['rank']} on {fault['host']}: {fault['cause']}"
                sys.stderr.write(f"[rank {self._rank}] stopping, because of {cause}\n")
            if not self._is_over.wait(LAST_SECONDS):
                end_process()
            return


_watch: FaultWatch | None = None
_numbers = itertools.count()


def watch_ranks() -> FaultWatch | None:
    """Starts a watch. Collective. None for a single process, and if a watch is running."""
    global _watch
    if _watch is not None or not dist.is_initialized() or dist.get_world_size() == 1:
        return None
    store = dist.PrefixStore(f"megasnn/watch-{next(_numbers)}", _get_default_store())
    _watch = FaultWatch(store, dist.get_rank())
    return _watch


def claim_fault(error: BaseException) -> bool:
    """Announces an error, if watched. False if another rank failed first."""
    return _watch is None or _watch.claim(error)


def end_process() -> None:
    """Exits with status 1 without cleaning up, which could wait for ended ranks."""
    sys.stdout.flush()
    sys.stderr.flush()
    # Cleaning up could wait for ended ranks.
    os._exit(1)
