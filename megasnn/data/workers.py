"""Worker processes of a DataLoader: started without what the rank holds, watched, and ended with the rank."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import forkserver, parent_process, resource_tracker
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from multiprocessing.util import Finalize
from types import ModuleType
from typing import Any

import torch
from threadpoolctl import threadpool_limits
from torch.utils.data import DataLoader

from megasnn.host_memory import keep_free_memory

STEP_SECONDS = 2.0
"""Interval in which a waiting rank looks after its workers."""
_FOR_THE_RANK = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)


def worker_context() -> Any:
    """Context in which a DataLoader starts its workers: copies of a process that has imported torch and this package.

    A launcher or a terminal signals all processes of a job, but the rank needs its workers until it has saved: these
    signals are blocked in the process that is copied, and so in its copies.
    """
    context = torch.multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["megasnn.data.reading", "megasnn.data.workers"])
    resource_tracker.ensure_running()  # which would unblock them
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _FOR_THE_RANK)
    try:
        forkserver.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    return context


def start_worker(number: int) -> None:
    """Prepares a worker: one thread, and an end as soon as the rank is gone, however that has ended."""
    # By name: a descriptor is asked for at the worker, and a stopped one never answers.
    torch.multiprocessing.set_sharing_strategy("file_system")
    keep_free_memory()
    threadpool_limits(1)
    threading.Thread(target=_end_with_rank, name="megasnn-rank", daemon=True).start()


def _end_with_rank() -> None:
    # torch's own watchdog looks at the process that forks, which lives as long as its copies.
    if rank := parent_process():
        rank.join()
    os._exit(1)


@contextmanager
def _starting() -> Iterator[None]:
    """Starts processes that do not run the user's script once more, which may lack a guard, or be no file at all.

    A rank that is a daemon of multiprocessing may start them too.
    """
    main, options = sys.modules["__main__"], multiprocessing.current_process()._config  # type: ignore[attr-defined]
    daemon = options.pop("daemon", None)
    sys.modules["__main__"] = ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main
        options.update({} if daemon is None else {"daemon": daemon})


class WorkerWatch:
    """Workers of one DataLoader, which end with this object at the latest.

    Args:
        seconds: of silence of all workers after which the run ends.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._workers: list[BaseProcess] = []
        # At exit too, before multiprocessing waits for its children, which do not take SIGTERM.
        self.end = Finalize(self, _kill, args=(self._workers,), exitpriority=100)

    def iterate(self, loader: DataLoader[Any]) -> Iterator[Any]:
        """Items of a DataLoader whose `timeout` is `STEP_SECONDS`.

        Raises:
            ChildProcessError: a worker has ended, or none gives anything for too long.
        """
        before = multiprocessing.active_children()
        with _starting():
            iterator = iter(loader)
        self._workers += [each for each in multiprocessing.active_children() if each not in before]
        waited = 0.0
        while True:
            try:
                item = next(iterator)
            except StopIteration:
                return
            except (RuntimeError, EOFError, OSError) as error:  # EOFError: it died while it handed memory over
                is_silent = "timed out" in str(error)
                waited += STEP_SECONDS * is_silent
                wait([each.sentinel for each in self._workers], 0.0 if is_silent else 1.0)
                status = {each.pid: each.exitcode for each in self._workers}
                if is_silent and set(status.values()) == {None} and waited < self._seconds:
                    continue
                states = [f"{pid}: {'alive' if code is None else f'status {code}'}" for pid, code in status.items()]
                raise ChildProcessError(
                    f"no data for {waited:g} s from the data workers ({', '.join(states)}): {error}. If memory ran "
                    "out, lower --num-workers or --micro-batch-size; if /dev/shm is full, raise it (docker run "
                    "--shm-size=2g); if they are silent, a file system hangs"
                ) from error
            waited = 0.0
            yield item


def _kill(workers: list[BaseProcess]) -> None:
    for worker in workers:
        worker.kill()  # also where it is stopped
    for worker in workers:
        worker.join()
