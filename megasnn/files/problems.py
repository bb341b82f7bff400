"""Errors of checkpoints and weights: one exception, whose arguments are the problems that were found."""

from __future__ import annotations

from collections.abc import Iterable

SHOWN = 30


class CheckpointError(ValueError):
    """A checkpoint cannot be written, read, or used for this model. Every argument is one problem."""

    def __str__(self) -> str:
        return "\n".join(str(problem) for problem in self.args)


class DamagedError(CheckpointError):
    """What was read is not what was written: files are missing, cut or altered. Another checkpoint may be intact."""


class NoCheckpointError(CheckpointError):
    """There is no checkpoint at all where one was looked for; a run may choose to start anew."""


def problem_list(title: str, problems: Iterable[str], kind: type[CheckpointError] = CheckpointError) -> CheckpointError:
    """One error with a title and all distinct problems, in order; beyond 30 they are only counted."""
    distinct = sorted(set(problems))
    rest = [f"... and {len(distinct) - SHOWN} more"] if len(distinct) > SHOWN else []
    return kind(title, *(f"  {problem}" for problem in distinct[:SHOWN] + rest))


def raise_problems(title: str, problems: Iterable[str], kind: type[CheckpointError] = CheckpointError) -> None:
    """Raises one error when there is any problem."""
    found = list(problems)
    if found:
        raise problem_list(title, found, kind)
