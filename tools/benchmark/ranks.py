"""Processes that act as ranks, for the benchmark and the tests (tests/rank_pool.py).

They wait on a pipe for calls. Training itself starts no ranks: torchrun does.
"""

from __future__ import annotations

import multiprocessing
import multiprocessing.connection
import os
import pickle
import signal
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext, SpawnContext
from typing import Any

GRACE_SECONDS = 1.0
THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")


class RankError(RuntimeError):
    """A rank raised, died or did not answer in time. Has the answers of all failed ranks."""


class RankProcesses:
    """Ranks, each an object in its own process.

    Args:
        name: for errors.
        make: module-level function; `make(task)` returns, in the process, the object whose methods `call` calls.
        tasks: one for each rank.
        variables: environment variables, set before a process imports anything.
        context: start method; None for a fresh interpreter, whose memory peak is its own.
    """

    def __init__(
        self,
        name: str,
        make: Callable[[Any], Any],
        tasks: Iterable[Any],
        variables: Mapping[str, str] | None = None,
        context: SpawnContext | ForkServerContext | None = None,
    ) -> None:
        self._name = name
        self._make = make
        self._variables = dict(variables or {})
        self._context = context or multiprocessing.get_context("spawn")
        self._ranks: list[tuple[Any, Connection]] = []
        self._starting: list[int] = []
        self.start(tasks)

    def __len__(self) -> int:
        return len(self._ranks)

    def start(self, tasks: Iterable[Any]) -> None:
        """Starts another rank for each task; `ready` waits for them."""
        for task in tasks:
            ours, theirs = self._context.Pipe()
            process: Any = self._context.Process(target=_serve, args=(theirs, self._variables), daemon=True)
            process.start()
            theirs.close()
            self._starting.append(len(self._ranks))
            self._ranks.append((process, ours))
            self._send(len(self._ranks) - 1, self._make, (task,))

    def ready(self, timeout: float) -> None:
        """Waits until every rank has made its object. Raises RankError."""
        starting = self._starting
        self._starting = []
        self._collect("start", starting, timeout, GRACE_SECONDS)

    def call(
        self, method: str, *arguments: Any, timeout: float, ranks: int | None = None, grace: float = GRACE_SECONDS
    ) -> list[Any]:
        """Results of `method(*arguments)`, in rank order.

        Args:
            timeout: seconds for all answers.
            ranks: number of ranks to call, from the first; None for all.
            grace: seconds left for the others after a failure, since they may wait for the failed rank.

        Raises:
            RankError: a rank raised, died or did not answer in time. All ranks have ended.
        """
        called = range(len(self._ranks) if ranks is None else ranks)
        for rank in called:
            self._send(rank, method, arguments)
        return self._collect(method, called, timeout, grace)

    def close(self) -> None:
        """Kills the processes."""
        for process, pipe in self._ranks:
            pipe.close()
            process.kill()
        for process, _ in self._ranks:
            process.join()
        self._ranks.clear()
        self._starting.clear()

    def _send(self, rank: int, *message: Any) -> None:
        # A rank that has died is reported when its answer is collected.
        with suppress(OSError):
            self._ranks[rank][1].send(message)

    def _collect(self, method: str, ranks: Sequence[int], timeout: float, grace: float) -> list[Any]:
        waiting = {self._ranks[rank][1]: rank for rank in ranks}
        results: dict[int, Any] = {}
        failures: dict[int, str] = {}
        deadline = time.monotonic() + timeout
        while waiting:
            heard = multiprocessing.connection.wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))
            if not heard:
                break
            for pipe in [pipe for pipe in waiting if pipe in heard]:
                rank = waiting.pop(pipe)
                succeeded, value = self._receive(rank)
                if succeeded:
                    results[rank] = value
                else:
                    failures[rank] = value
            if failures:
                deadline = min(deadline, time.monotonic() + grace)
        problems = [f"rank {rank}: {text}" for rank, text in sorted(failures.items())]
        if waiting and not problems:
            silent = ", ".join(map(str, sorted(waiting.values())))
            problems = [f"no answer from rank {silent} within {timeout:g} s"]
        if problems:
            self.close()
            raise RankError("\n".join([f"{self._name} failed in {method}:", *problems]))
        return [results[rank] for rank in ranks]

    def _receive(self, rank: int) -> tuple[bool, Any]:
        process, pipe = self._ranks[rank]
        try:
            return pipe.recv()
        except (EOFError, OSError):
            process.join(GRACE_SECONDS)
            code = process.exitcode
            if code is not None and code < 0:
                return False, f"killed by signal {-code} (9: the machine may be out of memory)"
            return False, f"the process ended with status {code}"


@contextmanager
def start_ranks(name: str, make: Callable[[Any], Any], work: Any, ranks: int, threads: int) -> Iterator[RankProcesses]:
    """Ranks whose tasks are (work, rank, path of the store for `join_ranks`); `ready` waits for them."""
    environment = {**dict.fromkeys(THREAD_VARIABLES, str(threads)), "LOCAL_WORLD_SIZE": str(ranks)}
    with tempfile.TemporaryDirectory(prefix="megasnn-benchmark-") as folder:
        tasks = [(work, rank, f"{folder}/store") for rank in range(ranks)]
        with closing(RankProcesses(f"row {name}", make, tasks, environment)) as processes:
            yield processes


def join_ranks(store: str, rank: int, ranks: int, backend: str = "gloo") -> None:
    """Initialises torch.distributed through `store`, the path of a file that must not exist yet. Collective."""
    import torch.distributed as dist

    dist.init_process_group(backend, store=dist.FileStore(store, ranks), rank=rank, world_size=ranks)


def _serve(pipe: Connection, variables: Mapping[str, str]) -> None:
    """Makes the object of the first message, then calls its methods, and answers each message."""
    os.environ.update(variables)
    # Ctrl-C reaches all processes of the terminal, and the parent ends its ranks itself. This module imports torch
    # late, so that this line runs first.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    made: list[Any] = []
    while True:
        try:
            message = pipe.recv_bytes()
        except (EOFError, OSError):
            return
        outcome = _outcome(message, made)
        try:
            pipe.send(outcome)
        except Exception:  # a result that cannot be pickled
            pipe.send((False, traceback.format_exc()))


def _outcome(message: bytes, made: list[Any]) -> tuple[bool, Any]:
    try:
        function, arguments = pickle.loads(message)
        if made:
            return True, getattr(made[0], function)(*arguments)
        made.append(function(*arguments))
        return True, None
    except BaseException:
        return False, traceback.format_exc()
