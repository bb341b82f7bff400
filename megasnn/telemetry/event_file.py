"""An event file of TensorBoard that outlives a full disk, and a folder that is removed or cannot be written."""

from __future__ import annotations

import io
import os
import socket
import time
from collections import deque
from pathlib import Path
from typing import Any

from tensorboard.compat.proto.event_pb2 import Event, SessionLog, SourceMetadata
from tensorboard.summary.writer.record_writer import RecordWriter
from torch.utils.tensorboard import FileWriter, SummaryWriter

MOST_WAITING_BYTES = 64 << 20


class EventFile:
    """Takes the place of TensorBoard's `EventFileWriter`, whose thread ends at the first error and loses what it has.

    Events wait in memory until `flush`, which alone touches the disk, in the calling thread. Where it fails, the file
    ends with its last whole event, as before, and what waits is written by the next `flush` that succeeds.

    Args:
        purge_step: TensorBoard hides the points of earlier files from this step on; None hides nothing.
        most_waiting_bytes: beyond these the oldest events that wait are dropped.
    """

    def __init__(self, directory: str, purge_step: int | None, most_waiting_bytes: int = MOST_WAITING_BYTES) -> None:
        self._directory, self._most = Path(directory), most_waiting_bytes
        # The files of a folder are read in the order of their names, which begin with seconds in other writers too.
        stamp = f"{int(time.time()):010d}.{time.perf_counter_ns():020d}"
        self._file = self._directory / f"events.out.tfevents.{stamp}.{socket.gethostname()}.{os.getpid()}"
        source = SourceMetadata(writer=__name__)
        self._head = _record(Event(wall_time=time.time(), file_version="brain.Event:2", source_metadata=source))
        if purge_step is not None:
            self._head += _record(Event(step=purge_step, session_log=SessionLog(status=SessionLog.START)))
        self._waiting, self._bytes = deque[bytes](), 0

    def get_logdir(self) -> str:
        return str(self._directory)

    def add_event(self, event: Event) -> None:
        self._waiting.append(_record(event))
        self._bytes += len(self._waiting[-1])
        while self._bytes > self._most and len(self._waiting) > 1:
            self._bytes -= len(self._waiting.popleft())

    def flush(self) -> None:
        """Writes what waits. Raises OSError when that is not possible now; then nothing of it is in the file."""
        self._directory.mkdir(parents=True, exist_ok=True)
        with open(self._file, "ab", buffering=0) as file:  # opened each time: it may have been removed
            end = file.tell()
            events = memoryview(b"".join(self._waiting) if end else self._head + b"".join(self._waiting))
            try:
                while events:  # a disk takes its last bytes first, and then says that it is full
                    events = events[file.write(events) :]
            except OSError:
                file.truncate(end)
                raise
        self._waiting.clear()
        self._bytes = 0

    def close(self) -> None:
        self.flush()


class _FileWriter(FileWriter):
    """torch's `FileWriter` on an `EventFile`."""

    def __init__(self, directory: str, purge_step: int | None) -> None:
        self.event_writer = EventFile(directory, purge_step)


class EventWriter(SummaryWriter):
    """torch's `SummaryWriter` on an `EventFile`: nothing but `flush` and `close` touches the disk or raises OSError."""

    file_writer: Any
    all_writers: Any

    def _get_file_writer(self) -> FileWriter:
        """torch's own opens a file here. Called by every method that adds something."""
        if self.file_writer is None:
            self.file_writer = _FileWriter(self.log_dir, self.purge_step)
            self.all_writers = {self.log_dir: self.file_writer}
        return self.file_writer


def _record(event: Event) -> bytes:
    """An event as it stands in a file, with its length and checksums."""
    record = io.BytesIO()
    RecordWriter(record).write(event.SerializeToString())
    return record.getvalue()
