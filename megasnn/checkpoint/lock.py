"""Locks a checkpoint folder, and notes the job that wrote it.

torchrun starts all ranks anew when one is lost (--max-restarts) or when nodes come and go, with the same command
line. By the note, the job then continues from its own checkpoints, not from --load.
"""

from __future__ import annotations

import os
import socket
from pathlib import Path

from filelock import FileLock, Timeout

from megasnn.checkpoint.folder import clean, list_checkpoints
from megasnn.common.files import CheckpointError, read_regular, write_whole

LOCK = ".lock"
NOTE = ".job"
_PATIENCE_SECONDS = 20.0  # a restarted run may be faster than the end of the one before


class FolderLock:
    """Held by a run's first rank, until `release` or the process ends.

    Args:
        continues: the run loads this folder's checkpoint and goes on from it.
    Attributes:
        restarted: the folder holds this job's checkpoints from before a restart.
    Raises:
        CheckpointError: another run (named) holds the lock, the folder cannot be written, or it holds other runs'
            checkpoints and this run does not continue them.
    """

    def __init__(self, folder: Path, continues: bool = True) -> None:
        self._note = folder / NOTE
        self._job = os.environ.get("TORCHELASTIC_RUN_ID", "")
        restarts = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
        # Only after a restart: otherwise a second run is to be told at once.
        self._lock = FileLock(folder / LOCK, timeout=_PATIENCE_SECONDS * (restarts > 0), thread_local=False)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            (folder / LOCK).touch()
        except OSError as error:
            raise CheckpointError(f"cannot write into the folder {folder}, check --save: {error}") from None
        # Before the lock is held: later the note names this run.
        holder, job = _read(self._note)
        has_locks = self._acquire(folder, holder)
        there = list_checkpoints(folder)
        # With a rendezvous of fixed addresses torchrun calls every job "none".
        is_own = bool(self._job) and job == self._job and (job != "none" or restarts > 0)
        self.restarted = is_own and bool(there)
        # torchrun starts a refused job once more, and a job may end before it has loaded its checkpoint. Then nothing
        # here is its own: --load and --ckpt-step hold again.
        self._write_note(self._job if self.restarted or not there else "")
        if there and not self.restarted and not continues:
            self.release()
            raise CheckpointError(
                f"{folder} holds checkpoints up to iteration {there[-1]} that this run does not continue: give --load "
                f"{folder}, or another folder to --save"
            )
        notices = []
        if self.restarted:
            notices.append(f"the job was restarted: it continues from its own latest checkpoint in {folder}")
        if not has_locks:
            notices.append(f"WARNING: no locks on the file system of {folder}: use it for one run")
        self.notice = "\n".join(notices)

    def _acquire(self, folder: Path, holder: str) -> bool:
        """False on a file system without locks. Raises CheckpointError while another run holds the lock."""
        try:
            self._lock.acquire()
        except Timeout:
            raise CheckpointError(
                f"another run ({holder}) saves its checkpoints in {folder}: end it, or choose another --save"
            ) from None
        except (OSError, NotImplementedError):  # of file systems without flock
            return False
        # Only where no other run can be writing.
        clean(folder)
        return True

    def adopt(self) -> None:
        """The run has loaded this folder's checkpoint; a restarted job continues from it."""
        self._write_note(self._job)

    def release(self) -> None:
        self._lock.release()

    def _write_note(self, job: str) -> None:
        write_whole(self._note, f"process {os.getpid()} on {socket.gethostname()}\n{job}\n")


def _read(file: Path) -> tuple[str, str]:
    """Last holder, and torchrun's job name; empty without one."""
    try:
        holder, job = read_regular(file).decode().splitlines()
        return holder, job
    except (OSError, ValueError):  # there is none
        return "unknown", ""
