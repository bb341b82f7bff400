"""How large the cache may become: what was used least recently goes, but nothing that a running process uses.

Each process keeps a file with the names of what it uses, locked for as long as it lives. A file whose lock is free is
that of a process which has ended. On a file system without locks the process id in the file's name tells. Another
host's locks and processes may not be seen here, so its files count for a week.
"""

from __future__ import annotations

import contextlib
import os
import re
import socket
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

from megasnn.cache.folder import CacheError, cache_folder
from megasnn.files.locks import LockError, Outcome, held, open_lock, try_lock

LIMIT = "MEGASNN_CACHE_GB"
"""Environment variable: how many gigabytes the cache may hold."""
_DEFAULT_GB = 50.0
_USERS, _LOCK = "users", ".lock"
_LIST_NAME = re.compile(r"(?P<host>.+)-(?P<process>\d+)-[0-9a-f]{12}")
MACHINE_CODE = "numba"
"""Folder of the kernels' machine code, which is small and is not removed."""
_PATIENCE_SECONDS = 60.0
_LEFT_OVER_SECONDS = 3600.0
_FOREIGN_SECONDS = 7 * 86400.0
_UNCOUNTED_BYTES = 64 << 20  # looking through all files for each small one would be slow

_lists: dict[Path, int] = {}  # by cache folder: the descriptor of this process's list
_claimed: set[Path] = set()
_uncounted: dict[Path, int] = {}  # by cache folder: bytes made since it was last looked through


def _forget() -> None:
    """A child has no list yet; that of its parent stays locked while either of them lives."""
    _lists.clear()
    _claimed.clear()


os.register_at_fork(after_in_child=_forget)


def claim(path: Path) -> bool:
    """Notes that this process uses a cached file, which then stays until the process ends; False where it is missing.

    Raises:
        LockError, OSError: the cache cannot be written.
    """
    if path in _claimed and path.exists():
        return True
    root = cache_folder()
    with _alone(root):
        if not path.exists():
            return False
        mark_used(path)
        os.write(_own_list(root), f"{path.resolve()}\n".encode())
    _claimed.add(path)
    return True


def mark_used(path: Path) -> None:
    """Makes a file one of those that were used last. Its time of change stays: names of indexes depend on it."""
    with contextlib.suppress(OSError):
        os.utime(path, ns=(time.time_ns(), path.stat().st_mtime_ns))


def make_room(path: Path) -> None:
    """Removes what was used least recently until the cache, in which `path` is new, is within its limit.

    Raises:
        CacheError: what is in use is too large already; the message says how to raise the limit.
        LockError, OSError: the cache cannot be written.
    """
    root, limit = cache_folder(), cache_limit()
    _uncounted[root] = _uncounted.get(root, _UNCOUNTED_BYTES) + path.stat().st_size
    if _uncounted[root] < min(_UNCOUNTED_BYTES, limit // 8):
        return
    with _alone(root):
        used = set(_used()) | {str(path.resolve())}
        files = sorted(_files(root))
        total = sum(size for _, size, _ in files)
        unfinished = sum(size for _, size, file in files if file.name.startswith(".") and file != path)
        for used_at, size, file in files:
            hidden = file.name.startswith(".")  # locks, and what is being made
            left_over = hidden and time.time() - used_at > _LEFT_OVER_SECONDS and not _is_held(file)
            if (left_over or (total > limit and not hidden)) and str(file) not in used:
                file.unlink(missing_ok=True)
                total -= size
    if total - unfinished > limit:  # others that make something come here themselves, when it is finished
        raise CacheError(
            f"the cache {root} would hold {total / 1e9:.3g} GB, more than {LIMIT} allows ({limit / 1e9:g}), and what "
            f"is in use cannot be removed; raise {LIMIT}, or unpack the shards yourself"
        )
    _uncounted[root] = 0


def cache_limit() -> int:
    """Bytes that the cache may hold. Raises CacheError where the environment variable is no number."""
    text = os.environ.get(LIMIT)
    try:
        limit = float(text) if text else _DEFAULT_GB
    except ValueError:
        limit = -1.0
    if not 0 < limit < 1e9:
        raise CacheError(f"the environment variable {LIMIT} must be a number of gigabytes above 0, it is {text!r}")
    return int(limit * 1e9)


@contextlib.contextmanager
def _alone(root: Path) -> Iterator[None]:
    with held(root / _LOCK, "looks through the cache", _PATIENCE_SECONDS):
        yield


def _files(root: Path) -> Iterator[tuple[float, int, Path]]:
    """Time of the last use, size and path of what may be removed."""
    for folder, names, files in os.walk(root):
        if Path(folder) == root:
            names[:] = [name for name in names if name not in (_USERS, MACHINE_CODE)]
        for name in files:
            path = Path(folder, name)
            with contextlib.suppress(FileNotFoundError):
                state = path.lstat()
                if path != root / _LOCK:
                    yield max(state.st_atime, state.st_mtime), state.st_size, path


def _is_held(file: Path) -> bool:
    """Whether a file is a lock that a process holds."""
    if not file.name.endswith(_LOCK):
        return False
    try:
        descriptor = open_lock(file)
    except LockError:  # a link or a pipe with the name of a lock
        return False
    try:
        return try_lock(descriptor) is Outcome.HELD
    finally:
        os.close(descriptor)


def _own_list(root: Path) -> int:
    """The file in which this process notes what it uses; one is begun where there is none."""
    if root not in _lists:
        for _ in _used():  # on the way, lists of processes that have ended are removed
            pass
        name = f"{socket.gethostname()}-{os.getpid()}-{uuid.uuid4().hex[:12]}"
        descriptor = open_lock(cache_folder(_USERS) / name)
        try_lock(descriptor)
        _lists[root] = descriptor
    return _lists[root]


def _used() -> Iterator[str]:
    """What running processes use; removes the lists of those that have ended."""
    for file in cache_folder(_USERS).iterdir():
        descriptor = open_lock(file)
        try:
            state = os.fstat(descriptor)
            if _has_ended(file.name, time.time() - state.st_mtime, try_lock(descriptor)):
                file.unlink(missing_ok=True)
            else:
                yield from os.pread(descriptor, state.st_size, 0).decode().splitlines()
        finally:
            os.close(descriptor)


def _has_ended(name: str, age: float, lock: Outcome) -> bool:
    """Whether the process that a list belongs to has ended, by the list's name, age in seconds and lock."""
    if lock is Outcome.HELD:
        return False
    parts = _LIST_NAME.fullmatch(name)
    if parts is None or parts["host"] != socket.gethostname():
        return age > _FOREIGN_SECONDS
    return lock is Outcome.TAKEN or not _is_running(int(parts["process"]))


def _is_running(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except (PermissionError, OverflowError):
        pass
    return True
