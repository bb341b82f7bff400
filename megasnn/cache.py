"""Cache folder: files that can be made again (indexes, fetched and unpacked shards, sample data, machine code)."""

from __future__ import annotations

import hashlib
import os
import re
import stat
import threading
from collections.abc import Callable
from pathlib import Path

from filelock import FileLock

from megasnn.files import sync

FOLDER = "MEGASNN_CACHE"
"""Environment variable: the cache folder, instead of megasnn in XDG_CACHE_HOME or ~/.cache."""
MACHINE_CODE = "numba"
"""Folder of the kernels' machine code."""
_ADVICE = f"set the environment variable {FOLDER} to a folder with space that you alone can write to"


class CacheError(ValueError):
    """The cache cannot be used: not this user's, not writable, or full. The message names the folder and what helps."""


def cache_folder(*parts: str) -> Path:
    """The cache folder, or a folder in it; made where it is missing.

    Raises:
        CacheError: it cannot be made, or others can write to it: machine code that lies there is run.
    """
    named, shared = os.environ.get(FOLDER), os.environ.get("XDG_CACHE_HOME", "")
    root = Path(named) if named else Path(shared if os.path.isabs(shared) else "~/.cache", "megasnn")
    try:
        folder = root.expanduser().absolute()
        for part in ("", *parts):
            folder = folder / part
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            state = folder.stat()
            if state.st_uid != os.geteuid() or state.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
                raise CacheError(f"another user owns or can write to the cache folder {folder}; {_ADVICE}")
    except (OSError, RuntimeError) as error:  # RuntimeError: a user without a home
        raise CacheError(f"cannot use the cache folder {root}: {error}; {_ADVICE}") from error
    return folder


def cached_name(source: Path, suffix: str, *version: str) -> str:
    """File name that changes with the path, size and time of change of `source` and with `version`."""
    state = source.stat()
    return name_in_cache(source.name, suffix, str(source.absolute()), f"{state.st_size} {state.st_mtime_ns}", *version)


def name_in_cache(readable: str, suffix: str, *version: str) -> str:
    """File name that begins with `readable` and changes with `version`."""
    beginning = re.sub(r"[^A-Za-z0-9_.-]", "_", readable).lstrip(".")[:80]
    return f"{beginning}-{hashlib.blake2b(os.fsencode(chr(0).join(version)), digest_size=8).hexdigest()}{suffix}"


def build_once(target: Path, build: Callable[[Path], object]) -> Path:
    """Returns `target`; where it does not exist yet, `build(temporary path)` makes it, in one process of a host.

    It appears complete or not at all: it is written beside its place, synced and renamed.

    Raises:
        CacheError: it cannot be written; and what `build` raises.
    """
    if target.exists():
        return target
    temporary = target.with_name(f".{target.name}.{os.getpid()}.{threading.get_ident()}")
    try:
        target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with FileLock(target.with_name(f".{target.name}.lock")):  # a process that ends releases it
            if not target.exists():
                build(temporary)
                sync(temporary)  # lest a power cut leave an empty file in its place
                os.replace(temporary, target)
    except OSError as error:
        raise CacheError(f"cannot make {target}: {error}; {_ADVICE}") from error
    finally:
        temporary.unlink(missing_ok=True)
    return target
