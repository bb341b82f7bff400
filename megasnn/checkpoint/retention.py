"""Which checkpoints stay when a new one has been saved."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from megasnn.checkpoint.description import read_metadata
from megasnn.checkpoint.errors import CheckpointError
from megasnn.checkpoint.folder import BEST, checkpoints, named, remove


@dataclass(frozen=True)
class Retention:
    """Which checkpoints of a folder stay.

    Attributes:
        last: how many of those saved last stay; None keeps all.
        every: those of iterations divisible by this stay as well.
        others: checkpoints up to this serial are of another run, and stay.
    """

    last: int | None = None
    every: int | None = None
    others: int = 0


def superfluous(folder: Path, retention: Retention) -> list[Path]:
    """The checkpoints that may go, the oldest first.

    The best by validation stays, where the folder names one.
    Only complete ones count, and only they go: one with missing or cut files does not push out one that is intact.
    """
    if retention.last is None:
        return []
    serials = {step: serial for step, serial in _serials(folder) if serial > retention.others}
    oldest_first = sorted(serials, key=lambda step: (serials[step], step))
    found, best = checkpoints(folder), named(folder, BEST)
    return [
        found[step]
        for step in oldest_first[: -retention.last]
        if step != best and (retention.every is None or step % retention.every != 0)
    ]


def prune(folder: Path, retention: Retention) -> list[Path]:
    """Removes what is superfluous, except what somebody is reading: that goes another time. Returns what went."""
    return [path for path in superfluous(folder, retention) if remove(path)]


def clean(folder: Path) -> None:
    """Removes what killed runs left half written. Only for the run that holds the folder's lock."""
    needed = set(checkpoints(folder).values())
    for path in folder.glob("iter_*.tmp"):
        if path not in needed:
            shutil.rmtree(path, ignore_errors=True)


def _serials(folder: Path) -> Iterator[tuple[int, int]]:
    for step, path in checkpoints(folder).items():
        try:
            yield step, read_metadata(path).serial
        except CheckpointError:
            continue
