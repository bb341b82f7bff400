"""What the tables of names have in common."""

from __future__ import annotations

from collections.abc import Iterable

from megasnn.checkpoint.errors import raise_problems

NORM_TENSORS = ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")


def require_equal(expected: Iterable[str], given: Iterable[str], title: str) -> None:
    """Raises CheckpointError that lists the names missing and unexpected, when there are any."""
    expected, given = set(expected), set(given)
    missing = [f"{name}: missing" for name in expected - given]
    raise_problems(title, missing + [f"{name}: unexpected" for name in given - expected])
