"""Files that are on disk before anything depends on them, and there as a whole or not at all."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path


def sync(path: Path) -> None:
    """Waits until a file, or a folder's list of names, is on disk. Raises OSError."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_whole(path: Path, text: str) -> None:
    """Writes or replaces a file by way of `.NAME.partial` beside it. Raises OSError; nothing is left of it then."""
    aside = path.with_name(f".{path.name}.partial")
    aside.unlink(missing_ok=True)  # it may be a link to something else
    try:
        aside.write_text(text)
        sync(aside)
        os.replace(aside, path)
    except OSError:
        with suppress(OSError):
            aside.unlink()
        raise
