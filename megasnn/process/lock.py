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
from dataclasses import asdict, dataclass, field
from pathlib import Path

from pydantic import with_config

from megasnn.checkpoint.errors import CheckpointError
from megasnn.files.described import STRICT, Count, DescriptionError, described, open_lock

LOCK = ".lock"
_PATIENCE_SECONDS = 20.0


@with_config(STRICT)
@dataclass(frozen=True)
class Note:
    """What a run leaves for whoever holds the lock next.

    Attributes:
        job: torchrun's name of the run.
        last_serial: of the checkpoints that were there when it was first started.
    """

    job: str | None = None
    last_serial: Count = 0


@with_config(STRICT)
@dataclass(frozen=True)
class _Content:
    holder: dict[str, str | int] = field(default_factory=dict)
    note: Note = Note()


class FolderLock:
    """Held from the moment it is made until `release`, or the end of the process.

    Args:
        patient: wait a while for the holder to end: a restarted run may be faster than the end of the one before.
    Attributes:
        note: what a holder before has kept in the file (`keep`).
        holds: False where the file system has no locks.
    Raises:
        CheckpointError: another run holds it (says who), or the folder cannot be written.
    """

    def __init__(self, folder: Path, patient: bool = False) -> None:
        self._path = folder / LOCK
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._file = open_lock(self._path)
        except OSError as error:
            raise CheckpointError(f"cannot write into the folder {folder}, check --save: {error}") from None
        self.holds = self._acquire(time.monotonic() + (_PATIENCE_SECONDS if patient else 0.0))
        self.note = self._read().note
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
        holder = self._read().holder
        self._file.close()
        who = ", ".join(f"{name} {value}" for name, value in holder.items()) or "unknown"
        return CheckpointError(
            f"another run ({who}) saves its checkpoints in {self._path.parent}: end it, or choose another --save"
        )

    def _read(self) -> _Content:
        """What is in the file; nothing where whoever wrote it was killed meanwhile, or it is of somebody else."""
        try:
            return described(_Content, os.pread(self._file.fileno(), 65536, 0), self._path)
        except DescriptionError:
            return _Content()

    def keep(self, note: Note) -> None:
        """Writes who holds the lock, and a note for whoever holds it next."""
        self.note = note
        holder = {"host": socket.gethostname(), "process": os.getpid(), "since": time.strftime("%Y-%m-%d %H:%M:%S")}
        content = json.dumps({"holder": holder, "note": asdict(note)}).encode()
        os.pwrite(self._file.fileno(), content, 0)
        os.ftruncate(self._file.fileno(), len(content))

    def release(self) -> None:
        self._file.close()
