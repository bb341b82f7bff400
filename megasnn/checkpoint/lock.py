"""One run writes into a folder of checkpoints at a time; a second one is refused.

The lock is the kernel's (flock) on a file in the folder, held by the process of the first rank: it is gone when that
process is, however it ended, so that a restarted job is never kept out by its own past. Linux passes flock on to NFS
servers (since NFSv3, unless mounted with `nolock` or `local_lock=flock`) and Lustre does with `-o flock`; on a file
system without locks the run goes on and says so.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import socket
import time
from pathlib import Path
from typing import Any

from megasnn.checkpoint.errors import CheckpointError

LOCK = ".lock"
_PATIENCE_SECONDS = 20.0


class FolderLock:
    """Held from the moment it is made until `release`, or the end of the process.

    Args:
        patient: wait a while for the holder to end: a restarted run may be faster than the end of the one before.
    Attributes:
        note: what a holder before has kept in the file (`keep`); empty without one.
        holds: False where the file system has no locks.
    Raises:
        CheckpointError: another run holds it (says who), or the folder cannot be written.
    """

    def __init__(self, folder: Path, patient: bool = False) -> None:
        self._path = folder / LOCK
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._file = open(os.open(self._path, os.O_RDWR | os.O_CREAT, 0o644), "r+b", buffering=0)
        except OSError as error:
            raise CheckpointError(f"cannot write into the folder {folder}, check --save: {error}") from None
        self.holds = self._acquire(time.monotonic() + (_PATIENCE_SECONDS if patient else 0.0))
        self.note = self._read()
        self.keep(self.note)

    def _acquire(self, deadline: float) -> bool:
        while True:
            try:
                fcntl.flock(self._file.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
                return True
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise self._refusal() from None
                time.sleep(0.2)
            except OSError as error:
                if error.errno in (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS):
                    return False
                raise CheckpointError(f"cannot lock {self._path}: {error}") from None

    def _refusal(self) -> CheckpointError:
        holder = self._read("holder")
        self._file.close()
        who = ", ".join(f"{name} {value}" for name, value in holder.items()) or "unknown"
        return CheckpointError(
            f"another run ({who}) saves its checkpoints in {self._path.parent}: end it, or choose another --save"
        )

    def _read(self, part: str = "note") -> dict[str, Any]:
        try:
            return dict(json.loads(os.pread(self._file.fileno(), 65536, 0))[part])
        except (ValueError, KeyError, TypeError):
            return {}

    def keep(self, note: dict[str, Any]) -> None:
        """Writes who holds the lock, and a note for whoever holds it next."""
        self.note = note
        holder = {"host": socket.gethostname(), "process": os.getpid(), "since": time.strftime("%Y-%m-%d %H:%M:%S")}
        content = json.dumps({"holder": holder, "note": note}).encode()
        os.pwrite(self._file.fileno(), content, 0)
        os.ftruncate(self._file.fileno(), len(content))

    def release(self) -> None:
        self._file.close()
