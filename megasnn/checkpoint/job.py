"""The folder that a run saves in: its lock, and whether a restarted job finds checkpoints of its own there.

One run writes into a folder at a time; a second one is refused. The first rank's process holds a lock of the kernel's
(flock) on a file in the folder, which is gone when that process is, however it ended, so that a restarted job is never
kept out by its own past. Linux passes flock on to NFS servers (since NFSv3, unless mounted with `nolock` or
`local_lock=flock`) and Lustre does with `-o flock`; on a file system without locks the run goes on and says so.

torchrun starts all ranks anew when one is lost (--max-restarts) or when nodes come and go, with the same command line.
What the job had reached then counts, and not what it was started from.
"""

from __future__ import annotations

import io
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path

from pydantic import with_config

from megasnn.checkpoint.folder import clean, last_serial
from megasnn.files.described import STRICT, Count, DescriptionError, described
from megasnn.files.locks import LockError, Outcome, acquire, open_lock, this_process, write_note
from megasnn.files.problems import CheckpointError

LOCK = ".lock"
_PATIENCE_SECONDS = 20.0


@with_config(STRICT)
@dataclass(frozen=True)
class Note:
    """What a run leaves for the one that holds the lock next.

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
        CheckpointError: another run holds it (names its process), or the folder cannot be written.
    """

    def __init__(self, folder: Path, patient: bool = False) -> None:
        self._path = folder / LOCK
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._file = io.FileIO(open_lock(self._path, private=False), "r+b")
            outcome = acquire(self._file.fileno(), _PATIENCE_SECONDS if patient else 0.0)
        except (OSError, LockError) as error:
            raise CheckpointError(f"cannot write into the folder {folder}, check --save: {error}") from None
        if outcome is Outcome.HELD:
            raise self._refusal()
        self.holds = outcome is Outcome.TAKEN
        self.note = self._read().note
        self.keep(self.note)

    def _refusal(self) -> CheckpointError:
        holder = self._read().holder
        self._file.close()
        who = ", ".join(f"{name} {value}" for name, value in holder.items()) or "unknown"
        return CheckpointError(
            f"another run ({who}) saves its checkpoints in {self._path.parent}: end it, or choose another --save"
        )

    def _read(self) -> _Content:
        """What is in the file; nothing where its writer was killed meanwhile, or where another program wrote it."""
        try:
            return described(_Content, os.pread(self._file.fileno(), 65536, 0), self._path)
        except DescriptionError:
            return _Content()

    def keep(self, note: Note) -> None:
        """Writes which process holds the lock, and a note for the next one that does."""
        self.note = note
        write_note(self._file.fileno(), {"holder": this_process(), "note": asdict(note)})

    def release(self) -> None:
        self._file.close()


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
            self._lock.keep(Note(job, last_serial(folder)))
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

    def release(self) -> None:
        self._lock.release()
