"""Agreement between ranks on Python objects, decisions and errors, over the hosts' process group.

A `group` of None is a single process without torch.distributed.
"""

from __future__ import annotations

import math
import pickle
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, TypeVar

import torch.distributed as dist

from megasnn.common.files import CheckpointError, DamagedError, raise_problems

_T = TypeVar("_T")
_Report = TypeVar("_Report")


def rank_in(group: dist.ProcessGroup | None) -> int:
    return 0 if group is None else group.rank()


def gather(group: dist.ProcessGroup | None, value: _T) -> list[_T]:
    """All ranks' values in rank order, on every rank. Collective."""
    if group is None:
        return [value]
    values: list[Any] = [None] * group.size()
    dist.all_gather_object(values, value, group=group)
    return values


def gather_in_call(group: dist.ProcessGroup | None, call: str, value: _T) -> list[_T]:
    """`gather` at the start of public method `call`. Raises ValueError if ranks called different ones."""
    gathered = gather(group, (call, value))
    first_rank_of: dict[str, int] = {}
    for rank, (called, _) in enumerate(gathered):
        first_rank_of.setdefault(called, rank)
    if len(first_rank_of) > 1:
        calls = ", ".join(f"rank {rank} called {called}" for called, rank in first_rank_of.items())
        raise ValueError(f"every rank calls the same methods in the same order (not under `if rank == 0`): {calls}")
    return [value for _, value in gathered]


def sum_over_ranks(group: dist.ProcessGroup | None, values: Sequence[float]) -> list[float]:
    """Exact sums, column by column. Collective."""
    columns = zip(*gather(group, values), strict=True)
    # fsum rounds once, so that the order of the ranks does not matter.
    return [math.fsum(column) for column in columns]


def broadcast_result(group: dist.ProcessGroup | None, decide: Callable[[], _T]) -> _T:
    """Runs `decide` on the first rank and returns its result on every rank. Collective.

    Raises:
        the error of `decide`, on every rank. Errors foreign to megasnn and Python reach other ranks as RuntimeError.
    """
    if group is None:
        return decide()
    results: list[_T] = []
    error: Exception | None = None
    if rank_in(group) == 0:
        results, error = _attempt(decide)
    message = [(results, None if error is None else _sendable(error))]
    dist.broadcast_object_list(message, group_src=0, group=group)
    results, sent_error = message[0]
    if error is not None:
        raise error
    if sent_error is not None:
        raise sent_error
    return results[0]


def run_on_all_ranks(group: dist.ProcessGroup | None, work: Callable[[], _T], title: str) -> _T:
    """Collective.

    Raises:
        DamagedError: on every rank, with all ranks' problems, if every failure is a DamagedError.
        CheckpointError: the same for all other failures.
    """
    return run_and_gather(group, lambda: (work(), None), title)[0]


def run_and_gather(
    group: dist.ProcessGroup | None, work: Callable[[], tuple[_T, _Report]], title: str
) -> tuple[_T, list[_Report]]:
    """As `run_on_all_ranks`, with a second result for every rank. Returns (own first, all second ones)."""
    results, error = _attempt(work)
    failure = None if error is None else (isinstance(error, DamagedError), _problems(error))
    report = results[0][1] if results else None
    failures = []
    reports: list[Any] = []
    for failed, reported in gather(group, (failure, report)):
        reports.append(reported)
        if failed is not None:
            failures.append(failed)
    all_damaged = True
    problems: list[str] = []
    for is_damaged, problems_of_rank in failures:
        all_damaged = all_damaged and is_damaged
        problems += problems_of_rank
    raise_problems(title, problems, DamagedError if all_damaged else CheckpointError)
    # Without a problem on any rank there is a result.
    return results[0][0], reports


def _attempt(work: Callable[[], _T]) -> tuple[list[_T], Exception | None]:
    """One result and no error, or no result and an error."""
    try:
        return [work()], None
    except Exception as error:
        return [], error


def _sendable(error: Exception) -> Exception:
    """The error itself if another rank can rebuild it, otherwise a RuntimeError with its text."""
    if type(error).__module__.partition(".")[0] in ("megasnn", "builtins"):
        with suppress(Exception):
            # pickle raises errors of any type.
            if str(pickle.loads(pickle.dumps(error))) == str(error):
                return error
    return RuntimeError(f"{type(error).__name__}: {error}")


def _problems(error: Exception) -> list[str]:
    if isinstance(error, CheckpointError):
        return [str(problem) for problem in error.args]
    if isinstance(error, ValueError):
        return [str(error)]
    return [f"{type(error).__name__}: {error}"]
