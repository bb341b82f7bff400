"""The ranks of a row as processes of their own, which sleep on a pipe until their row has its turn."""

from __future__ import annotations

import multiprocessing
import multiprocessing.connection
import os
import signal
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any

GRACE_SECONDS = 1.0


class RowError(RuntimeError):
    """A rank raised, died or did not answer in time; says what every rank that spoke up said."""


class RankProcesses:
    """One freshly started interpreter per task, so that memory peaks are its own.

    Args:
        name: of the row, for messages.
        make: `make(task)` gives, inside the process, the object whose methods `call` calls. A module-level function.
        tasks: one per rank.
        environment: variables that must be set before the process imports anything.
    """

    def __init__(
        self, name: str, make: Callable[[Any], Any], tasks: Sequence[Any], environment: Mapping[str, str]
    ) -> None:
        self._name = name
        self._ranks: list[tuple[Any, Connection]] = []
        context = multiprocessing.get_context("spawn")
        with _environment(environment):
            for task in tasks:
                ours, theirs = context.Pipe()
                process = context.Process(target=_serve, args=(theirs, make, task), daemon=True)
                process.start()
                theirs.close()
                self._ranks.append((process, ours))

    def call(self, method: str, *arguments: Any, timeout: float) -> list[Any]:
        """The results of all ranks' `method(*arguments)`, in rank order. Raises RowError within `timeout` seconds."""
        for _, pipe in self._ranks:
            try:
                pipe.send((method, arguments))
            except OSError:
                pass  # it has died: collecting the answers tells
        return self._collect(method, timeout)

    def ready(self, timeout: float) -> None:
        """Waits until every rank has made its object. Raises RowError within `timeout` seconds."""
        self._collect("start", timeout)

    def _collect(self, what: str, timeout: float) -> list[Any]:
        waiting = {pipe: rank for rank, (_, pipe) in enumerate(self._ranks)}
        results: dict[int, Any] = {}
        failures: list[str] = []
        deadline = time.monotonic() + timeout
        while waiting:
            heard = multiprocessing.connection.wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))
            if not heard:
                break
            for pipe in heard:
                rank = waiting.pop(pipe)  # type: ignore[call-overload]
                succeeded, value = self._receive(rank)
                if succeeded:
                    results[rank] = value
                    continue
                failures.append(f"rank {rank}: {value}")
                # The others wait for this rank now. What they may still have to say comes at once.
                deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
        if waiting and not failures:
            silent = ", ".join(map(str, sorted(waiting.values())))
            failures.append(f"no answer from rank {silent} within {timeout:g} s (--timeout)")
        if failures:
            raise RowError("\n".join([f"row {self._name} failed in {what}:", *failures]))
        return [results[rank] for rank in range(len(self._ranks))]

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

    def close(self) -> None:
        """Ends the processes, at once."""
        for process, pipe in self._ranks:
            pipe.close()
            process.kill()
        for process, _ in self._ranks:
            process.join()
        self._ranks.clear()


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


def _serve(pipe: Connection, make: Callable[[Any], Any], task: Any) -> None:
    # Ctrl-C reaches the whole terminal; the parent ends its ranks itself.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    made: list[Any] = []
    pipe.send(_outcome(lambda: made.append(make(task))))
    while made:
        try:
            method, arguments = pipe.recv()
        except (EOFError, OSError):
            return
        pipe.send(_outcome(lambda: getattr(made[0], method)(*arguments)))  # noqa: B023  (called right here)


def _outcome(action: Callable[[], Any]) -> tuple[bool, Any]:
    try:
        return True, action()
    except BaseException:
        return False, traceback.format_exc()
