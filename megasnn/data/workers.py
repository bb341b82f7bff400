"""A DataLoader's worker processes: started clean, watched, and ended with their rank."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from multiprocessing import forkserver, parent_process, queues, resource_tracker
from multiprocessing.process import BaseProcess
from multiprocessing.util import Finalize
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from threadpoolctl import threadpool_limits
from torch.utils.data import DataLoader

from megasnn.common.memory import keep_free_memory

STEP_SECONDS = 5.0
"""Interval at which a waiting rank checks its workers."""
_RANK_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)


def start_worker(number: int) -> None:
    """Prepares a worker: one thread, and an exit with its rank."""
    # Share memory by name: the rank would request a descriptor from the worker, and a stopped worker never answers.
    torch.multiprocessing.set_sharing_strategy("file_system")
    keep_free_memory()
    threadpool_limits(1)
    # The type stubs know no private attributes, here and below.
    queue_type: Any = queues.Queue
    queue_type._on_queue_feeder_error = staticmethod(_end_worker)
    end_with_parent()


def _end_worker(error: BaseException, batch: object) -> None:
    # The batch cannot be passed on (/dev/shm is full), and the rank would wait for it.
    print(f"data worker {os.getpid()}: {error}", file=sys.stderr, flush=True)
    os._exit(1)


def end_with_parent() -> None:
    """Ends this process with its parent."""
    threading.Thread(target=_wait_for_parent, name="megasnn-parent", daemon=True).start()


def _wait_for_parent() -> None:
    # torch's watchdog watches the fork server instead, which lives as long as its workers.
    if parent := parent_process():
        parent.join()
    os._exit(1)


@contextmanager
def _starting() -> Iterator[None]:
    """Starts processes from a fork server, which has imported torch and this package."""
    # Without a `__main__`, they do not run the user's script: it may lack a guard, or be no file.
    main = sys.modules["__main__"]
    process: Any = multiprocessing.current_process()
    options = process._config
    forkserver.set_forkserver_preload(["megasnn.data.loader", "megasnn.data.workers"])
    # Its start would unblock the signals.
    resource_tracker.ensure_running()
    # multiprocessing forbids a daemon to start processes, and a rank may be one.
    daemon = options.pop("daemon", None)
    # A launcher or terminal signals every process of a job, but the rank needs its workers until it has saved: the fork
    # server starts with these signals blocked, and its copies inherit that.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _RANK_SIGNALS)
    sys.modules["__main__"] = ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        if daemon is not None:
            options["daemon"] = daemon


class WorkerWatch:
    """One DataLoader's workers, which end with this object.

    Args:
        seconds: silence from all workers that ends the run.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._iterators: list[Any] = []
        # At exit this must run before multiprocessing waits for its children, which ignore SIGTERM.
        self.end = Finalize(self, _end, args=(self._iterators,), exitpriority=100)

    def iterate(self, loader: DataLoader[Any]) -> Iterator[Any]:
        """Yields a DataLoader's items; warns of stopped workers. Raises ChildProcessError for dead or silent ones."""
        with _starting():
            iterator: Any = iter(loader)
        self._iterators[:] = [iterator]  # the same one in each pass, since workers persist
        workers = iterator._workers
        silent = 0.0
        while True:
            try:
                item = next(iterator, None)
            except (RuntimeError, EOFError, OSError) as error:
                # EOFError: a worker died while passing memory on.
                silent += loader.timeout
                stopped = _describe_stopped(workers)
                # torch itself looks for dead workers after each timeout.
                if "timed out" in str(error) and silent < self._seconds:
                    if stopped and silent == loader.timeout:
                        warnings.warn(f"no data for {silent:g} s: {stopped}", stacklevel=2)
                    continue
                raise ChildProcessError(
                    f"no data for {silent:g} s: {stopped or error}. If memory ran out, lower --num-workers or "
                    "--micro-batch-size; if /dev/shm is full, enlarge it (docker run --shm-size=2g); if the workers "
                    "are silent, a file system hangs"
                ) from error
            if item is None:
                return
            silent = 0.0
            yield item


def _describe_stopped(workers: list[BaseProcess]) -> str:
    stopped = []
    for worker in workers:
        with suppress(OSError):  # it has ended
            state = Path(f"/proc/{worker.pid}/stat").read_text().rpartition(") ")[2][0]
            if state == "T":
                stopped.append(str(worker.pid))
    return f"data worker {', '.join(stopped)} is stopped; kill -CONT continues it" if stopped else ""


def _end(iterators: list[Any]) -> None:
    # Left to the garbage collector, an iterator starts the thread of an unused queue. The collector may close this
    # thread's pipe a second time, and with it a file that the rank opened in between.
    for iterator in iterators:
        for worker in iterator._workers:
            worker.kill()  # SIGKILL also ends stopped ones
        for worker in iterator._workers:
            worker.join()
        iterator._shutdown_workers()
    iterators.clear()
