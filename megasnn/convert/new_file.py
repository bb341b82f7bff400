"""Files that are there as a whole or not at all, and never in the place of another."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from megasnn.checkpoint.folder import LATEST, named, step_folder
from megasnn.checkpoint.job import FolderLock
from megasnn.files.durable import sync
from megasnn.files.problems import CheckpointError


def refuse_existing(path: Path, flag: str) -> None:
    """Raises CheckpointError when there is something at `path` already."""
    if path.exists():
        raise CheckpointError(f"{path} exists already; remove it or give another {flag}")


@contextmanager
def new_checkpoint(save: Path, iteration: int) -> Iterator[None]:
    """Around writing a checkpoint into a run's folder, into which nobody else writes meanwhile.

    Raises:
        CheckpointError: there is a checkpoint of this iteration already, or a later one, of which this one would take
            the place as the latest; or a run saves there.
    """
    refuse_existing(step_folder(save, iteration), "--save")
    latest = named(save, LATEST)
    if latest is not None and latest > iteration:
        raise CheckpointError(
            f"{save} holds a run that has come to iteration {latest}; one of iteration {iteration} would become its "
            "latest: give another --save"
        )
    lock = FolderLock(save)
    try:
        yield
    finally:
        lock.release()


@contextmanager
def new_file(path: Path) -> Iterator[Path]:
    """A path aside to write the file to; renamed to `path` at the end, safely on disk, or removed on an error."""
    refuse_existing(path, "--output")
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(f"{path.name}.tmp")
    aside.unlink(missing_ok=True)  # it may be a link to something else
    try:
        yield aside
        sync(aside)
        os.rename(aside, path)
        sync(path.parent)
    finally:
        aside.unlink(missing_ok=True)
