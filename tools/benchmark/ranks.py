"""Processes that act as ranks: the benchmark's, and those of the tests (tests/rank_pool.py).

They sleep on a pipe until they are called. It stands here and not in the package because training starts no ranks:
torchrun does.
"""

from __future__ import annotations

import logging
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
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext, SpawnContext
from typing import Any, Generic, TypeVar

GRACE_SECONDS = 1.0
GROUP_SECONDS = 5.0
THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")

Work = TypeVar("Work")


class RankError(RuntimeError):
    """A rank raised, died or did not answer in time; says what every rank that spoke up said."""


class RankProcesses:
    """The ranks of one name, each an object in a process of its own.

    Args:
        name: of what they run, for messages.
        make: `make(task)` gives, inside the process, the object whose methods `call` calls. A module-level function.
        tasks: one for each rank.
        environment: variables that must be set before a process imports anything.
        context: how processes start; by default each is a fresh interpreter, so that memory peaks are its own.
        limit_flag: what sets the time limits, for messages.
        start_others: whether they start processes themselves, which end with them.
    """

    def __init__(
        self,
        name: str,
        make: Callable[[Any], Any],
        tasks: Iterable[Any],
        environment: Mapping[str, str] | None = None,
        context: SpawnContext | ForkServerContext | None = None,
        limit_flag: str = "",
        start_others: bool = False,
    ) -> None:
        self._start_others = start_others
        self._name, self._make, self._environment = name, make, environment or {}
        self._context = context or multiprocessing.get_context("spawn")
        self._limit_flag = f" ({limit_flag})" if limit_flag else ""
        self._ranks: list[tuple[Any, Connection]] = []
        self._starting: list[int] = []
        self.start(tasks)

    def __len__(self) -> int:
        return len(self._ranks)

    def start(self, tasks: Iterable[Any]) -> None:
        """Starts a further rank for each task; `ready` waits for them."""
        with _environment(self._environment):
            for task in tasks:
                ours, theirs = self._context.Pipe()
                arguments, is_daemon = (theirs, self._start_others), not self._start_others
                process: Any = self._context.Process(target=_serve, args=arguments, daemon=is_daemon)
                process.start()
                theirs.close()
                self._starting.append(len(self._ranks))
                self._ranks.append((process, ours))
                self._send(len(self._ranks) - 1, self._make, (task,))

    def ready(self, timeout: float) -> None:
        """Waits until every rank has made its object. Raises RankError as `call` does."""
        starting, self._starting = self._starting, []
        self._collect("start", starting, timeout, GRACE_SECONDS)

    def call(
        self, method: str, *arguments: Any, timeout: float, ranks: int | None = None, grace: float = GRACE_SECONDS
    ) -> list[Any]:
        """The results of `method(*arguments)`, in rank order.

        Args:
            timeout: seconds until all must have answered.
            ranks: how many are called, from the first on; None: all.
            grace: seconds that the others have left when one has failed: they may wait for it in vain.
        Raises:
            RankError: a rank raised, died or did not answer in time. All ranks have ended then.
        """
        called = range(len(self._ranks) if ranks is None else ranks)
        for rank in called:
            self._send(rank, method, arguments)
        return self._collect(method, called, timeout, grace)

    def close(self) -> None:
        """Ends the processes, at once."""
        for process, pipe in self._ranks:
            pipe.close()
            if self._start_others:
                _kill_group(process.pid)
            process.kill()
        for process, _ in self._ranks:
            process.join()
            if self._start_others:
                _wait_for_group(process.pid)
        self._ranks.clear()
        self._starting.clear()

    def _send(self, rank: int, *message: Any) -> None:
        try:
            self._ranks[rank][1].send(message)
        except OSError:
            pass  # it has died: collecting the answers tells

    def _collect(self, what: str, ranks: Sequence[int], timeout: float, grace: float) -> list[Any]:
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
                (results if succeeded else failures)[rank] = value
            if failures:
                deadline = min(deadline, time.monotonic() + grace)
        told = [f"rank {rank}: {text}" for rank, text in sorted(failures.items())]
        if waiting and not told:
            silent = ", ".join(map(str, sorted(waiting.values())))
            told = [f"no answer from rank {silent} within {timeout:g} s{self._limit_flag}"]
        if told:
            self.close()
            raise RankError("\n".join([f"{self._name} failed in {what}:", *told]))
        return [results[rank] for rank in ranks]

    def _receive(self, rank: int) -> tuple[bool, Any]:
        process, pipe = self._ranks[rank]
        try:
            return pipe.recv()
        except (EOFError, OSError):
            process.join(GRACE_SECONDS)
            code = process.exitcode
            if code is not None and code < 0:
                return False, f"killed by signal {-code} (9 is what a machine without free memory sends)"
            return False, f"the process ended with status {code}"


@dataclass(frozen=True)
class RankTask(Generic[Work]):
    """What a rank of a row is told when it starts.

    Attributes:
        work: what the row measures.
        rank, ranks: its number, and how many the row has.
        threads: of this rank.
        store: a file through which the ranks find each other; those of further worlds have names that begin like it.
    """

    work: Work
    rank: int
    ranks: int
    threads: int
    store: str


@contextmanager
def start_row(
    name: str,
    make: Callable[[RankTask[Work]], object],
    work: Work,
    ranks: int,
    threads: int = 1,
    variables: Mapping[str, str] | None = None,
) -> Iterator[RankProcesses]:
    """Inside, the ranks of a row of the table are there, which `make` makes of their tasks; `ready` waits for them.

    Args:
        variables: more of their environment.
    """
    environment = {**dict.fromkeys(THREAD_VARIABLES, str(threads)), **(variables or {})}
    with tempfile.TemporaryDirectory(prefix="megasnn-benchmark-") as folder:
        tasks = [RankTask(work, rank, ranks, threads, f"{folder}/store") for rank in range(ranks)]
        with closing(RankProcesses(f"row {name}", make, tasks, environment, limit_flag="--timeout")) as processes:
            yield processes


def set_up_rank(task: RankTask[Any]) -> None:
    """For the beginning of `make`: the threads, and no warnings that every machine without a GPU would show."""
    import torch

    logging.getLogger("torch._library.triton").setLevel(logging.ERROR)
    torch.set_num_threads(task.threads)


def join_ranks(store: str, rank: int, ranks: int, backend: str = "gloo") -> None:
    """Makes the world of torch.distributed; `store` is a file of which nothing may be there yet. Collective."""
    import torch.distributed as dist

    dist.init_process_group(backend, store=dist.FileStore(store, ranks), rank=rank, world_size=ranks)


class Worlds:
    """Worlds of torch.distributed that a rank is in, one after another; no world is there between two.

    Attributes:
        rank, ranks: as in the task.
    """

    def __init__(self, task: RankTask[Any]) -> None:
        self.rank, self.ranks, self._store, self._count = task.rank, task.ranks, task.store, 0

    @contextmanager
    def of_first(self, ranks: int) -> Iterator[bool]:
        """Inside, there is a world of the first ranks of the row, where they are several; gives whether this is one of
        them. To be entered by all ranks of the row alike."""
        import torch.distributed as dist

        self._count += 1
        is_in = self.rank < ranks
        if is_in and ranks > 1:
            join_ranks(f"{self._store}-{self._count}", self.rank, ranks)
        try:
            yield is_in
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()


@contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _kill_group(leader: int) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(leader, signal.SIGKILL)


def _wait_for_group(leader: int) -> None:
    """Until the memory of a GPU that its processes held is free again, or for a while."""
    end = time.monotonic() + GROUP_SECONDS
    with suppress(ProcessLookupError, PermissionError):
        while time.monotonic() < end:
            os.killpg(leader, 0)
            time.sleep(0.05)


def _serve(pipe: Connection, starts_others: bool = False) -> None:
    """Makes the object that the first message asks for, then calls its methods; sends how each of that ended."""
    if starts_others:
        os.setpgid(0, 0)
    # Ctrl-C reaches the whole terminal; the parent ends its ranks itself. So this module imports torch only when it
    # is needed, after this line.
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
        except Exception:  # a result that cannot be sent
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
