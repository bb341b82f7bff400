"""Ranks agree: one decides for all, or each does its part and all of them hear of every failure.

A `group` of None stands for a process on its own, without torch.distributed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch.distributed as dist

from megasnn.common.files import CheckpointError, DamagedError, raise_problems

_T = TypeVar("_T")


def rank_in(group: dist.ProcessGroup | None) -> int:
    return 0 if group is None else group.rank()


def gather(group: dist.ProcessGroup | None, value: _T) -> list[_T]:
    """Gathers every rank's value, in rank order, on every rank."""
    if group is None:
        return [value]
    values: list[_T | None] = [None] * group.size()
    dist.all_gather_object(values, value, group=group)
    return values  # type: ignore[return-value]


def broadcast_result(group: dist.ProcessGroup | None, decide: Callable[[], _T]) -> _T:
    """Runs `decide` on the group's first rank; its result, or the error it raised, reaches every rank."""
    box = [_attempt(decide) if rank_in(group) == 0 else (None, None)]
    if group is not None:
        dist.broadcast_object_list(box, group_src=0, group=group)
    value, error = box[0]
    if error is not None:
        raise error
    return value  # type: ignore[return-value]


def run_on_all_ranks(group: dist.ProcessGroup | None, work: Callable[[], _T], title: str) -> _T:
    """Runs `work` on every rank. If it fails on any, all raise the same error, which lists the problems.

    It is a DamagedError when all that failed is one.
    """
    value, error = _attempt(work)
    failures = [failure for failure in gather(group, error) if failure is not None]
    damaged = all(isinstance(failure, DamagedError) for failure in failures)
    problems = (problem for failure in failures for problem in failure.args)
    raise_problems(title, problems, DamagedError if damaged else CheckpointError)
    return value  # type: ignore[return-value]


def _attempt(work: Callable[[], _T]) -> tuple[_T | None, CheckpointError | None]:
    try:
        return work(), None
    except CheckpointError as error:
        return None, error
    except Exception as error:  # not every kind can be sent
        sent = CheckpointError(f"{error}" if isinstance(error, ValueError) else f"{type(error).__name__}: {error}")
        sent.__cause__ = error
        return None, sent
