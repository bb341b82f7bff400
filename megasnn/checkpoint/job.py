"""Lock of the folder that a run saves in. It knows whether a restarted job finds checkpoints of its own there.

The first rank's process holds a lock of the kernel's (flock), which is gone when that process is, however it ended.
torchrun starts all ranks anew when one is lost (--max-restarts) or when nodes come and go, with the same command line:
the job then goes on from its own checkpoints, not from the one that it was first started from.
"""

from __future__ import annotations

import fcntl
import json
import os
import socket
import time
from dataclasses import dataclass
from pathlib import Path

from pydantic import with_config

from megasnn.checkpoint.folder import clean, last_serial
from megasnn.files import STRICT, CheckpointError, Count, DescriptionError, described

LOCK = ".lock"
_PATIENCE_SECONDS = 20.0  # a restarted run may be faster than the end of the one before


@with_config(STRICT)
@dataclass(frozen=True)
class _Note:
    """Content of the lock file: its holder; torchrun's name of the job, and the last serial when that first started."""

    holder: str = "unknown"
    job: str | None = None
    last_serial: Count = 0


class FolderLock:
    """Lock of a folder of checkpoints, from the moment it is made until `release`, or the end of the process.

    Args:
        is_job: this process is the first rank of a run, and not a converter.
    Attributes:
        resumes: this is a restart, and the job has saved something since it was first started.
        found: the last serial that was there when the job was first started.
        notice: for the user; "" when there is nothing to say.
    Raises:
        CheckpointError: another run holds it (names its process), or the folder cannot be written.
    """

    def __init__(self, folder: Path, is_job: bool = False) -> None:
        count, job = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")), os.environ.get("TORCHELASTIC_RUN_ID")
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._handle = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
            has_locks = self._acquire(time.monotonic() + _PATIENCE_SECONDS * (is_job and count > 0))
        except BlockingIOError:
            holder = self._read().holder
            self.release()
            raise CheckpointError(
                f"another run ({holder}) saves its checkpoints in {folder}: end it, or choose another --save"
            ) from None
        except OSError as error:
            raise CheckpointError(f"cannot write into the folder {folder}, check --save: {error}") from None
        before, last = self._read(), last_serial(folder)
        # With a rendezvous of fixed addresses torchrun calls every job "none".
        restarted = is_job and (count > 0 or (job not in (None, "none") and before.job == job))
        self.found = before.last_serial if restarted or not is_job else last
        self._write(
            _Note(f"process {os.getpid()} on {socket.gethostname()}", job if is_job else before.job, self.found)
        )
        self.resumes = restarted and last > self.found
        notices = [f"the job was here before: it goes on from its own latest checkpoint in {folder}"] * self.resumes
        if has_locks:
            clean(folder)
        else:
            notices.append(f"WARNING: no locks on the file system of {folder}: use it for one run")
        self.notice = "\n".join(notices)

    def _acquire(self, deadline: float) -> bool:
        """Takes the lock; False where the file system has none. Raises BlockingIOError after the deadline."""
        while True:
            try:
                fcntl.flock(self._handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return True
            except BlockingIOError:
                if time.monotonic() >= deadline:
                    raise
                time.sleep(0.05)
            except OSError:
                return False

    def _read(self) -> _Note:
        try:
            return described(_Note, os.pread(self._handle, 65536, 0), LOCK)
        except DescriptionError:  # its writer was killed meanwhile
            return _Note()

    def _write(self, note: _Note) -> None:
        text = json.dumps(vars(note)).encode()
        os.pwrite(self._handle, text, 0)
        os.ftruncate(self._handle, len(text))

    def release(self) -> None:
        os.close(self._handle)
