"""The folder that a run saves in: its lock, and whether a restarted job finds checkpoints of its own there.

torchrun starts all ranks anew when one is lost (--max-restarts) or when nodes come and go, with the same command line.
What the job had reached then counts, and not what it was started from.
"""

from __future__ import annotations

import os
from pathlib import Path

from megasnn.checkpoint.folder import last_serial
from megasnn.checkpoint.lock import FolderLock
from megasnn.checkpoint.retention import clean


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
        restarted = count > 0 or (job not in (None, "none") and before.get("job") == job)
        if not restarted:
            self._lock.keep({"job": job, "last_serial": last_serial(folder)})
        if self._lock.holds:
            clean(folder)
        self.found = int(self._lock.note.get("last_serial", 0))
        self.resumes = restarted and last_serial(folder) > self.found
        notices = []
        if not self._lock.holds:
            notices.append(f"WARNING: no locks on the file system of {folder}: use it for one run")
        if self.resumes:
            notices.append(f"the job was here before: it goes on from its own latest checkpoint in {folder}")
        self.notice = "\n".join(notices)

    def release(self) -> None:
        self._lock.release()
