"""Files derived from data sets (indexes, unpacked shards, sample data), made once for all ranks of a node.

They live in the folder named by ``MEGASNN_CACHE``, otherwise in ``~/.cache/megasnn``; deleting it is always
safe. Every file appears there complete or not at all: it is written beside its place and renamed. A lock
spares the work of ranks that start together; where the file system knows no locks they each write the same
bytes, and the last rename stays.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import re
import socket
from collections.abc import Callable, Iterator
from pathlib import Path


def cache_folder() -> Path:
    """The folder for derived files; it need not exist yet."""
    return Path(os.environ.get("MEGASNN_CACHE") or "~/.cache/megasnn").expanduser()


def cached_name(source: Path, suffix: str, *version: str) -> str:
    """A file name that changes with the path, size and time of change of `source` and with `version`."""
    state = source.stat()
    text = "\0".join([str(source.absolute()), str(state.st_size), str(state.st_mtime_ns), *version])
    readable = re.sub(r"[^\w.-]", "_", source.name)[:80]
    return f"{readable}-{hashlib.blake2b(text.encode(), digest_size=8).hexdigest()}{suffix}"


def build_once(target: Path, build: Callable[[Path], None]) -> Path:
    """Return `target`; where it does not exist yet, `build(temporary path)` makes it first.

    Any number of processes may call it at the same time. Whatever `build` raises, nothing is left behind.

    Raises:
        ValueError: the file cannot be written (no right, disk full); the message names it and the cause.
    """
    if target.exists():
        return target
    temporary = target.parent / f".{target.name}.{socket.gethostname()}.{os.getpid()}"
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with _lock(target.parent / f".{target.name}.lock"):
            if not target.exists():
                build(temporary)
                _flush(temporary)
                os.replace(temporary, target)
    except OSError as error:
        raise ValueError(
            f"cannot make {target}: {error}; if its folder is full or cannot be written, "
            f"set the environment variable MEGASNN_CACHE to another"
        ) from error
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink()
    return target


@contextlib.contextmanager
def _lock(path: Path) -> Iterator[None]:
    """Hold an exclusive lock on `path`; goes on without where the file system has none."""
    with open(path, "w") as file:
        with contextlib.suppress(OSError):
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _flush(path: Path) -> None:
    """Bring a file to disk before it is renamed, lest a power cut leave an empty one in its place."""
    with open(path, "rb") as file:
        os.fsync(file.fileno())
