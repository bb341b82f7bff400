"""Files derived from data sets (indexes, unpacked shards, sample data), made once for all ranks of a node.

Every file appears complete or not at all: it is written beside its place and renamed. A lock spares the work of ranks
that start together; where the file system knows no locks they each write the same bytes, and the last rename stays.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import socket
import threading
from collections.abc import Callable
from pathlib import Path

from megasnn.cache.folder import FOLDER, CacheError
from megasnn.cache.room import claim, make_room, mark_used
from megasnn.files.durable import sync
from megasnn.files.locks import held

_PATIENCE_SECONDS = 1800.0


def cached_name(source: Path, suffix: str, *version: str) -> str:
    """A file name that changes with the path, size and time of change of `source` and with `version`."""
    state = source.stat()
    return name_in_cache(
        source.name, suffix, str(source.absolute()), str(state.st_size), str(state.st_mtime_ns), *version
    )


def name_in_cache(readable: str, suffix: str, *version: str) -> str:
    """A file name that begins with what is readable and changes with `version`. It is short, and not a hidden file's:
    those are locks, and what is being made."""
    beginning = re.sub(r"[^A-Za-z0-9_.-]", "_", readable).lstrip(".")[:80]
    return f"{beginning}-{hashlib.blake2b(chr(0).join(version).encode(), digest_size=8).hexdigest()}{suffix}"


def build_once(
    target: Path, build: Callable[[Path], None], lasting: bool = True, patience: float = _PATIENCE_SECONDS
) -> Path:
    """Return `target`; where it does not exist yet, `build(temporary path)` makes it first.

    Any number of processes may call it at the same time. Whatever `build` raises, nothing is left behind.

    Args:
        target: in the cache.
        lasting: the file stays until this process ends. Otherwise it may be gone at any time: the cache removes what
            was used least recently when it needs room.
        patience: seconds to wait for another process, or thread, that makes it.

    Raises:
        CacheError: the file cannot be written (no right, disk or cache full); the message names it and the cause.
        LockError: another process has been making it for so long; the message names it.
    """
    temporary = target.parent / f".{target.name}.{socket.gethostname()}.{os.getpid()}.{threading.get_ident()}"
    try:
        while not (claim(target) if lasting else target.exists()):
            target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            with held(target.parent / f".{target.name}.lock", f"makes {target.name}", patience):
                if not target.exists():
                    build(temporary)
                    sync(temporary)  # lest a power cut leave an empty file in its place
                    make_room(temporary)
                    os.replace(temporary, target)
    except OSError as error:
        raise CacheError(
            f"cannot make {target}: {error}; if its folder is full or cannot be written, "
            f"set the environment variable {FOLDER} to another"
        ) from error
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink()
    mark_used(target)
    return target
