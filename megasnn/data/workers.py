"""Worker processes of a DataLoader: started without what the rank holds, watched, and ended with the rank."""

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
"""Interval in which a waiting rank looks after its workers."""
_FOR_THE_RANK = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)


def start_worker(number: int) -> None:
    """Prepares a worker: one thread, and an end as soon as the rank is gone, however that has ended."""
    # By name: a descriptor is asked for at the worker, and a stopped one never answers.
    torch.multiprocessing.set_sharing_strategy("file_system")
    keep_free_memory()
    threadpool_limits(1)
    queues.Queue._on_queue_feeder_error = staticmethod(_end_worker)  # type: ignore[attr-defined]
    end_with_parent()


def _end_worker(error: BaseException, batch: object) -> None:
    """Ends a worker whose batch cannot be handed over, as where /dev/shm is full: the rank would wait for it."""
    print(f"data worker {os.getpid()}: {error}", file=sys.stderr, flush=True)
    os._exit(1)


def end_with_parent() -> None:
    """Ends this process as soon as the one that started it has ended."""
    threading.Thread(target=_wait_for_parent, name="megasnn-parent", daemon=True).start()


def _wait_for_parent() -> None:
    # torch's own watchdog looks at the process that forks, which lives as long as its copies.
    if parent := parent_process():
        parent.join()
    os._exit(1)


@contextmanager
def _starting() -> Iterator[None]:
    """Starts processes that are copies of one that has imported torch and this package.

    They do not run the user's script once more, which may lack a guard, or be no file at all. A rank that is a daemon
    of multiprocessing may start them too. A launcher or a terminal signals all processes of a job, but the rank needs
    its workers until it has saved: these signals are blocked in the process that is copied, and so in its copies.
    """
    main, options = sys.modules["__main__"], multiprocessing.current_process()._config  # type: ignore[attr-defined]
    forkserver.set_forkserver_preload(["megasnn.data.loader", "megasnn.data.workers"])
    resource_tracker.ensure_running()  # which would unblock the signals
    daemon = options.pop("daemon", None)
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _FOR_THE_RANK)
    sys.modules["__main__"] = ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        options.update({} if daemon is None else {"daemon": daemon})


class WorkerWatch:
    """Workers of one DataLoader, which end with this object at the latest.

    Args:
        seconds: of silence of all workers after which the run ends.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._iterators: list[Any] = []
        # At exit too, before multiprocessing waits for its children, which do not take SIGTERM.
        self.end = Finalize(self, _end, args=(self._iterators,), exitpriority=100)

    def iterate(self, loader: DataLoader[Any]) -> Iterator[Any]:
        """Items of a DataLoader.

        Raises:
            ChildProcessError: a worker has ended, or none gives anything for too long; stopped ones are named before.
        """
        with _starting():
            iterator = iter(loader)
        self._iterators[:] = [iterator]  # the same in each pass, since workers persist
        workers, silent = iterator._workers, 0.0  # type: ignore[attr-defined]
        while True:
            try:
                item = next(iterator, None)
            except (RuntimeError, EOFError, OSError) as error:  # EOFError: it died while it handed memory over
                silent += loader.timeout
                stopped = _stopped(workers)
                # After each timeout torch looks for workers that have ended.
                if "timed out" in str(error) and silent < self._seconds:
                    if stopped and silent == loader.timeout:
                        warnings.warn(f"no data for {silent:g} s: {stopped}", stacklevel=2)
                    continue
                raise ChildProcessError(
                    f"no data for {silent:g} s: {stopped or error}. If memory ran out, lower --num-workers or "
                    "--micro-batch-size; if /dev/shm is full, raise it (docker run --shm-size=2g); if the workers are "
                    "silent, a file system hangs"
                ) from error
            if item is None:
                return
            silent = 0.0
            yield item


def _stopped(workers: list[BaseProcess]) -> str:
    """Names workers that a signal has stopped."""
    found = []
    for each in workers:
        with suppress(OSError):  # it has ended
            if Path(f"/proc/{each.pid}/stat").read_text().rpartition(") ")[2][0] == "T":
                found.append(str(each.pid))
    return f"data worker {', '.join(found)} is stopped, and goes on by kill -CONT" if found else ""


def _end(iterators: list[Any]) -> None:
    """Ends the workers of an iterator, and then the iterator.

    Left to the garbage collector, it would start the thread of a queue that was never used, and the pipe that this
    thread closes could be closed by the collector once more: a file opened in between would be gone from the rank.
    """
    for iterator in iterators:
        for worker in iterator._workers:
            worker.kill()  # also where it is stopped
        for worker in iterator._workers:
            worker.join()
        iterator._shutdown_workers()
    iterators.clear()
