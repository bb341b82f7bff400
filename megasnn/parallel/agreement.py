"""Ranks agree: one decides for all, or each does its part and all of them hear of every failure.

A `group` of None stands for a process on its own, without torch.distributed.
"""

from __future__ import annotations

import math
import pickle
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TypeVar

import torch.distributed as dist

from megasnn.common.files import CheckpointError, DamagedError, raise_problems

_T = TypeVar("_T")
_Report = TypeVar("_Report")


def rank_in(group: dist.ProcessGroup | None) -> int:
    return 0 if group is None else group.rank()


def gather(group: dist.ProcessGroup | None, value: _T) -> list[_T]:
    """Gathers every rank's value, in rank order, on every rank."""
    if group is None:
        return [value]
    values: list[_T | None] = [None] * group.size()
    dist.all_gather_object(values, value, group=group)
    return values  # type: ignore[return-value]


def gather_in_call(group: dist.ProcessGroup | None, call: str, value: _T) -> list[_T]:
    """Gathers every rank's value, in rank order, at the beginning of a call that all ranks make.

    Raises ValueError on every rank where they make different ones.
    """
    of_ranks = gather(group, (call, value))
    first: dict[str, int] = {}
    for rank, (called, _) in enumerate(of_ranks):
        first.setdefault(called, rank)
    if len(first) > 1:
        calls = ", ".join(f"rank {rank} called {called}" for called, rank in first.items())
        raise ValueError(f"every rank calls the same methods in the same order (not under `if rank == 0`): {calls}")
    return [found for _, found in of_ranks]


def sum_over_ranks(group: dist.ProcessGroup | None, values: Sequence[float]) -> list[float]:
    """Sums numbers of the hosts over all ranks; no device takes part. Collective."""
    return [math.fsum(of_ranks) for of_ranks in zip(*gather(group, values), strict=True)]


def broadcast_result(group: dist.ProcessGroup | None, decide: Callable[[], _T]) -> _T:
    """Runs `decide` on the group's first rank; its result, or the error it raised, reaches every rank.

    Raises:
        the same error on every rank, with type and arguments where it is one of ours or of Python's own; elsewhere
            than on the first rank, another one is a RuntimeError that names its type.
    """
    if group is None:
        return decide()
    value, error = _attempt(decide) if rank_in(group) == 0 else (None, None)
    box = [(value, None if error is None else _sendable(error))]
    dist.broadcast_object_list(box, group_src=0, group=group)
    value, sent = box[0]
    if error is not None:
        raise error
    if sent is not None:
        raise sent
    return value  # type: ignore[return-value]


def run_on_all_ranks(group: dist.ProcessGroup | None, work: Callable[[], _T], title: str) -> _T:
    """Runs `work` on every rank. If it fails on any, all raise the same error, which lists the problems.

    It is a DamagedError when all that failed is one.
    """
    return run_and_gather(group, lambda: (work(), None), title)[0]


def run_and_gather(
    group: dist.ProcessGroup | None, work: Callable[[], tuple[_T, _Report]], title: str
) -> tuple[_T, list[_Report]]:
    """`run_on_all_ranks` of work with two results: the first stays on its rank, the second reaches every rank.

    Returns:
        this rank's first result; the second results in rank order.
    """
    value, error = _attempt(work)
    failure = None if error is None else (isinstance(error, DamagedError), _problems(error))
    report = None if value is None else value[1]
    of_ranks = gather(group, (failure, report))
    failures = [failed for failed, _ in of_ranks if failed is not None]
    damaged = all(is_damaged for is_damaged, _ in failures)
    problems = (problem for _, listed in failures for problem in listed)
    raise_problems(title, problems, DamagedError if damaged else CheckpointError)
    reports = [reported for _, reported in of_ranks]
    return value[0], reports  # type: ignore[index, return-value]


def _attempt(work: Callable[[], _T]) -> tuple[_T | None, Exception | None]:
    try:
        return work(), None
    except Exception as error:
        return None, error


def _sendable(error: Exception) -> Exception:
    """The error, where another rank can rebuild it from its type and arguments, otherwise its text."""
    if type(error).__module__.partition(".")[0] in ("megasnn", "builtins"):
        with suppress(Exception):  # an argument that cannot be sent
            if str(pickle.loads(pickle.dumps(error))) == str(error):
                return error
    return RuntimeError(f"{type(error).__name__}: {error}")


def _problems(error: Exception) -> list[str]:
    """One line for each argument of a CheckpointError; the text of another error."""
    if isinstance(error, CheckpointError):
        return [str(problem) for problem in error.args]
    return [f"{error}" if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"]
