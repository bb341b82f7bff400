"""The folder that a run saves in: its lock, and whether a restarted job finds checkpoints of its own there.

torchrun starts all ranks anew when one is lost (--max-restarts) or when nodes come and go, with the same command line.
What the job had reached then counts, and not what it was started from.
"""

from __future__ import annotations

import os
from pathlib import Path

from megasnn.checkpoint.description import LAST_SERIAL
from megasnn.checkpoint.errors import CheckpointError
from megasnn.checkpoint.folder import last_serial
from megasnn.checkpoint.retention import clean
from megasnn.process.lock import FolderLock, Note


class JobFolder:
    """For the first rank only. Refuses (CheckpointError) a folder that another run saves in or that cannot be written.

    Attributes:
        resumes: this is a restart, and the job has saved something since it was first started.
        found: the last serial that was there when the job was first started.
        notice: what the user should know; "" when nothing.
    """

    def __init__(self, folder: Path) -> None:
        count, job = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")), os.environ.get("TORCHELASTIC_RUN_ID")
        self._lock = FolderLock(folder, patient=count > 0)
        before = self._lock.note
        # With a rendezvous of fixed addresses torchrun calls every job "none".
        restarted = count > 0 or (job not in (None, "none") and before.job == job)
        if not restarted:
            self._lock.keep(Note(job, self._usual_serial(folder)))
        if self._lock.holds:
            clean(folder)
        self.found = self._lock.note.last_serial
        self.resumes = restarted and last_serial(folder) > self.found
        notices = []
        if not self._lock.holds:
            notices.append(f"WARNING: no locks on the file system of {folder}: use it for one run")
        if self.resumes:
            notices.append(f"the job was here before: it goes on from its own latest checkpoint in {folder}")
        self.notice = "\n".join(notices)

    def _usual_serial(self, folder: Path) -> int:
        """The last serial there is, after which there are numbers for what the job will save."""
        last = last_serial(folder)
        if last > LAST_SERIAL // 2:
            self.release()
            raise CheckpointError(
                f"a checkpoint in {folder} says that {last} were saved there: its serial was altered; move it to "
                "another folder, or choose another --save"
            )
        return last

    def release(self) -> None:
        self._lock.release()
