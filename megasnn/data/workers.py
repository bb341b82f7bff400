"""Worker processes of a DataLoader: started without what the rank holds, watched, and gone with the rank."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing import forkserver, parent_process, resource_tracker
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from multiprocessing.util import Finalize
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from threadpoolctl import threadpool_limits
from torch.utils.data import DataLoader

from megasnn.free_memory import keep_free_memory

STEP_SECONDS = 2.0
"""How often the rank looks after its workers while it waits for them."""
_SAID_SECONDS = 10.0
_FOR_THE_RANK = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)


def worker_context() -> Any:
    """Context in which a DataLoader starts its workers: copies of a process that has imported torch and this package.

    What a launcher or a terminal sends to all processes is for the rank alone, which needs its workers until it has
    saved: these signals are blocked in the process that is copied, and so in its copies.
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
    keep_free_memory()
    threadpool_limits(1)
    threading.Thread(target=_end_with_rank, name="megasnn-rank", daemon=True).start()


@contextmanager
def _starting() -> Iterator[None]:
    """Starts processes that do not run the user's script once more, which may lack a guard, or be no file at all.

    A rank that is a daemon of multiprocessing may start them too: they end with it by themselves.
    """
    main, options = sys.modules["__main__"], multiprocessing.current_process()._config  # type: ignore[attr-defined]
    daemon = options.pop("daemon", None)
    sys.modules["__main__"] = ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main
        options.update({} if daemon is None else {"daemon": daemon})


def _end_with_rank() -> None:
    if rank := parent_process():
        rank.join()
    os._exit(1)


class WorkerWatch:
    """The workers of one DataLoader, which end with this object at the latest.

    Args:
        seconds: after which the run ends where no worker gives anything.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._workers: list[BaseProcess] = []
        # At exit too, before multiprocessing waits for its children, which do not take SIGTERM.
        self.end = Finalize(self, _kill, args=(self._workers,), exitpriority=100)

    def iterate(self, loader: DataLoader[Any]) -> Iterator[Any]:
        """What a DataLoader gives, whose `timeout` is `STEP_SECONDS`.

        Raises:
            ChildProcessError: a worker has ended, or none gives anything for too long; the message names it.
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
                wait([each.sentinel for each in self._workers], 0.0 if is_silent else 1.0)
                if lost := [each for each in self._workers if not each.is_alive()]:
                    raise ChildProcessError(_how_lost(lost[0])) from error
                if not is_silent:
                    raise
                waited += STEP_SECONDS
                self._complain(waited)
            else:
                waited = 0.0
                yield item

    def _complain(self, waited: float) -> None:
        silent = f"no micro-batch has come for {waited:.0f} s from the data workers {_states(self._workers)}"
        if waited >= self._seconds:
            raise ChildProcessError(
                f"{silent}: a file system hangs, or they were stopped; --fetch-timeout is the limit"
            )
        if waited - STEP_SECONDS < _SAID_SECONDS <= waited:
            sys.stderr.write(f"{silent}; the run ends after {self._seconds:g} s (--fetch-timeout)\n")


def _kill(workers: Sequence[BaseProcess]) -> None:
    for worker in workers:
        worker.kill()  # also where it is stopped
    for worker in workers:
        worker.join()


def _states(workers: Sequence[BaseProcess]) -> str:
    """Process ids, with what the system says of each on Linux: "12 (stopped), 13 (sleeping)"."""
    found = []
    for worker in workers:
        state = ""
        with suppress(OSError, IndexError):
            status = Path(f"/proc/{worker.pid}/status").read_text()
            state = f" ({status.partition('State:')[2].split()[1].strip('()')})"
        found.append(f"{worker.pid}{state}")
    return ", ".join(found)


def _how_lost(worker: BaseProcess) -> str:
    status = worker.exitcode
    if status is not None and status < 0:
        name = signal.Signals(-status).name
        hint = {
            "SIGKILL": "; has memory run out? Lower --num-workers or --micro-batch-size",
            "SIGBUS": f"; {SHARED_MEMORY}",
        }.get(name, "")
        return f"data worker {worker.pid} was killed by {name}{hint}"
    return f"data worker {worker.pid} ended with status {status}, and says why above"


SHARED_MEMORY = "is /dev/shm too small? Raise it (docker run --shm-size=2g), or lower --num-workers"
