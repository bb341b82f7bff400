"""Locks between processes: a file that one process holds, opened with care, and a limit on the waiting.

The lock is the kernel's (flock): it is gone when its process is, however that ended. The file says which process holds
it. It is opened without following links and must be a plain file, in a cache of this user, so that whoever can write
beside it can neither make us write elsewhere nor wait for ever.

The library filelock takes the same lock. But its file does not tell the process that holds it, has no place for what
the next holder should know, and may be another user's; where flock is missing its lock outlives the process.
"""

from __future__ import annotations

import contextlib
import enum
import errno
import fcntl
import json
import os
import socket
import stat
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

TIMEOUT = "MEGASNN_LOCK_TIMEOUT"
"""Environment variable: seconds to wait for a lock, instead of each lock's own limit."""
_NO_LOCKS = (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS)
_NOTE_BYTES = 4096
_POLL_SECONDS = 0.01


class LockError(ValueError):
    """A lock that cannot be had: the file is no lock file, or another process has held it for too long."""


@contextlib.contextmanager
def held(path: Path, doing: str, seconds: float) -> Iterator[None]:
    """Holds the lock `path` for a while; where the file system has no locks it goes on without.

    Args:
        path: of the lock file, which is made where it is missing and stays.
        doing: what the holder does, for the message of those that wait in vain: "compiles the kernels".
        seconds: to wait for it; 0 asks once.

    Raises:
        LockError: it is a link, a pipe or another user's; or another process holds it, which the message names.
        OSError: its folder is missing or cannot be written.
    """
    limit = _limit(seconds)
    descriptor = open_lock(path)
    try:
        if acquire(descriptor, limit) is Outcome.HELD:
            waited = f"; after {limit:g} s of waiting: end it if it hangs, or set {TIMEOUT} (seconds)"
            raise LockError(f"{holder(descriptor)} holds the lock {path}{waited if limit else ''}")
        with contextlib.suppress(OSError):  # a full disk: the lock itself needs no space
            write_note(descriptor, {**this_process(), "doing": doing})
        yield
    finally:
        os.close(descriptor)


def open_lock(path: Path, private: bool = True) -> int:
    """A descriptor of a lock file, which is made where it is missing; nothing in it is changed.

    Args:
        private: only this user may have made it, and nobody else may read it.

    Raises:
        LockError: it is a link, no plain file, or another user's where it should be private.
        OSError: it cannot be opened or made.
    """
    try:
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        descriptor = os.open(path, flags, 0o600 if private else 0o644)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENXIO, errno.EISDIR):
            raise LockError(f"{path} is no plain file ({error.strerror}): remove it, nothing here made it") from None
        raise
    state = os.fstat(descriptor)
    if stat.S_ISREG(state.st_mode) and (not private or state.st_uid == os.geteuid()):
        return descriptor
    os.close(descriptor)
    what = f"belongs to user {state.st_uid}" if stat.S_ISREG(state.st_mode) else "is no plain file"
    raise LockError(f"the lock {path} {what}: remove it, nothing here made it")


class Outcome(enum.Enum):
    """What became of an attempt to take a lock."""

    TAKEN = enum.auto()
    HELD = enum.auto()
    """By another process, or by another descriptor of this one."""
    NO_LOCKS = enum.auto()
    """The file system has none."""


def try_lock(descriptor: int, shared: bool = False) -> Outcome:
    """Takes the lock, without waiting; a shared one, several processes may hold."""
    try:
        fcntl.flock(descriptor, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        return Outcome.HELD
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
        return Outcome.NO_LOCKS
    return Outcome.TAKEN


def acquire(descriptor: int, seconds: float) -> Outcome:
    """Takes the lock; waits so long for another process that holds it."""
    deadline = time.monotonic() + seconds
    while (outcome := try_lock(descriptor)) is Outcome.HELD and time.monotonic() < deadline:
        time.sleep(_POLL_SECONDS)
    return outcome


def this_process() -> dict[str, Any]:
    """What a lock file says of the process that holds it."""
    return {"host": socket.gethostname(), "process": os.getpid(), "since": time.strftime("%Y-%m-%d %H:%M:%S")}


def write_note(descriptor: int, content: dict[str, Any]) -> None:
    """Writes JSON into a lock file, in place of what is there. Raises OSError."""
    text = json.dumps(content).encode()
    os.pwrite(descriptor, text, 0)
    os.ftruncate(descriptor, len(text))


def holder(descriptor: int) -> str:
    """The process that holds a lock, as a message names it."""
    try:
        found: dict[str, Any] = dict(json.loads(os.pread(descriptor, _NOTE_BYTES, 0)))
        return f"process {found['process']} on {found['host']} (since {found['since']}: {found['doing']})"
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return "another process, which left no note"


def _limit(seconds: float) -> float:
    text = os.environ.get(TIMEOUT)
    if not text or not seconds:
        return seconds
    try:
        limit = float(text)
    except ValueError:
        limit = -1.0
    if not 0 <= limit < float("inf"):
        raise LockError(f"the environment variable {TIMEOUT} must be a number of seconds, it is {text!r}")
    return limit
