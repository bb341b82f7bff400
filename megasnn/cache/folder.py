"""Where the cache is: a folder that belongs to this user, and that nobody else can write to.

What lies there is used without being asked for twice: locks, machine code, data that were checked when they were made.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path

FOLDER = "MEGASNN_CACHE"
"""Environment variable: the cache folder, instead of megasnn in XDG_CACHE_HOME or ~/.cache."""
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


class CacheError(ValueError):
    """The cache cannot be used: not this user's, not writable, or full. The message names the folder and what helps."""


def cache_folder(*parts: str) -> Path:
    """The cache folder, or a folder in it, as an absolute path without links; made where it is missing.

    Raises:
        CacheError: it cannot be made, belongs to another user, or others can write to it.
    """
    try:
        folder = _named().expanduser()
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        _require_own(folder)
        folder = folder.resolve()
        for part in parts:
            folder /= part
            folder.mkdir(mode=0o700, exist_ok=True)
            _require_own(folder)
    except (OSError, RuntimeError) as error:
        raise CacheError(f"cannot use the cache folder {_named()}: {error}; {_ADVICE}") from error
    return folder.resolve()


_ADVICE = f"set the environment variable {FOLDER} to a folder of your own"


def _named() -> Path:
    if named := os.environ.get(FOLDER):
        return Path(named)
    shared = os.environ.get("XDG_CACHE_HOME", "")
    return Path(shared if os.path.isabs(shared) else "~/.cache", "megasnn")


def _require_own(folder: Path) -> None:
    """Raises CacheError unless only this user can write to the folder. Nothing about it is changed: it may be /tmp.

    The folder may be a link that this user or the administrator made: homes are small on clusters.
    """
    place, state = folder.lstat(), folder.stat()
    if state.st_uid != os.geteuid() or (stat.S_ISLNK(place.st_mode) and place.st_uid not in (0, os.geteuid())):
        raise CacheError(f"the cache folder {folder} belongs to another user ({state.st_uid}); {_ADVICE}")
    if state.st_mode & _OTHERS_WRITE:
        raise CacheError(
            f"other users can write to the cache folder {folder} (mode {stat.S_IMODE(state.st_mode):o}); {_ADVICE}, "
            f"or take the right from them (chmod go-w)"
        )
