"""Lock of the folder that a run saves in. It knows whether a restarted job finds checkpoints of its own there.

torchrun starts all ranks anew when one is lost (--max-restarts) or when nodes come and go, with the same command line:
the job then goes on from its own checkpoints, not from the one that it was first started from.
"""

from __future__ import annotations

import os
import socket
from pathlib import Path

from filelock import FileLock, Timeout

from megasnn.checkpoint.folder import clean, list_checkpoints
from megasnn.files import CheckpointError, write_whole

LOCK = ".lock"
NOTE = ".job"
_PATIENCE_SECONDS = 20.0  # a restarted run may be faster than the end of the one before


class FolderLock:
    """Lock of a folder of checkpoints by the first rank of a run, until `release` or the end of the process.

    Args:
        continues: the run goes on from what it finds.
    Attributes:
        resumes: the job was here before, and there are checkpoints: they are its own.
        notice: for the user; "" when there is nothing to say.
    Raises:
        CheckpointError: another run holds it (names its process), the folder cannot be written, or it holds checkpoints
            that this run does not continue.
    """

    def __init__(self, folder: Path, continues: bool = True) -> None:
        restarts, job = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")), os.environ.get("TORCHELASTIC_RUN_ID")
        self._lock = FileLock(folder / LOCK, timeout=_PATIENCE_SECONDS * (restarts > 0), thread_local=False)
        self.notice = ""
        try:
            folder.mkdir(parents=True, exist_ok=True)
            (folder / LOCK).touch()
        except OSError as error:
            raise CheckpointError(f"cannot write into the folder {folder}, check --save: {error}") from None
        before, named = _read(folder / NOTE)
        try:
            self._lock.acquire()
        except Timeout:
            raise CheckpointError(
                f"another run ({before}) saves its checkpoints in {folder}: end it, or choose another --save"
            ) from None
        except (OSError, NotImplementedError):  # of file systems without flock
            self.notice = f"WARNING: no locks on the file system of {folder}: use it for one run"
        else:
            clean(folder)  # only where no other run can be writing
        # With a rendezvous of fixed addresses torchrun calls every job "none".
        own = job is not None and named == job and (job != "none" or restarts > 0)
        there = list_checkpoints(folder)
        self.resumes = own and bool(there)
        accepted = self.resumes or continues or not there
        # A job that was refused is started once more by torchrun: it finds by this that nothing here is its own.
        holder = f"process {os.getpid()} on {socket.gethostname()}"
        write_whole(folder / NOTE, f"{holder}\n{job or '' if accepted else ''}\n")
        if not accepted:
            self.release()
            raise CheckpointError(
                f"{folder} holds checkpoints up to iteration {there[-1]} that this run does not continue: give --load "
                f"{folder}, or another folder to --save"
            )
        if self.resumes:
            resumed = f"the job was here before: it goes on from its own latest checkpoint in {folder}"
            self.notice = "\n".join(filter(None, (resumed, self.notice)))

    def release(self) -> None:
        self._lock.release()


def _read(file: Path) -> tuple[str, str]:
    """Last holder of the lock, and torchrun's name of its job; "" where it was refused."""
    try:
        holder, job = file.read_text().splitlines()
        return holder, job
    except (OSError, ValueError):  # there is none
        return "unknown", ""
