"""TensorBoard's event files, written as `AppendedFile` writes."""

from __future__ import annotations

import io
import os
import socket
import time
from pathlib import Path
from typing import Any

from tensorboard.compat.proto.event_pb2 import Event, SessionLog, SourceMetadata
from tensorboard.summary.writer.record_writer import RecordWriter
from torch.utils.tensorboard import FileWriter, SummaryWriter

from megasnn.telemetry.tried import MOST_WAITING_BYTES, AppendedFile


class EventFile:
    """Takes the place of TensorBoard's `EventFileWriter`, whose thread ends at the first error and loses what it has.

    Args:
        purge_step: TensorBoard hides the points of earlier files from this step on; None hides nothing.
        most_waiting_bytes: see `AppendedFile`.
    """

    def __init__(self, directory: str, purge_step: int | None, most_waiting_bytes: int = MOST_WAITING_BYTES) -> None:
        self._directory = directory
        # The files of a folder are read in the order of their names, which begin with seconds in other writers too.
        stamp = f"{int(time.time()):010d}.{time.perf_counter_ns():020d}"
        path = Path(directory) / f"events.out.tfevents.{stamp}.{socket.gethostname()}.{os.getpid()}"
        source = SourceMetadata(writer=__name__)
        head = _record(Event(wall_time=time.time(), file_version="brain.Event:2", source_metadata=source))
        if purge_step is not None:
            head += _record(Event(step=purge_step, session_log=SessionLog(status=SessionLog.START)))
        self._file = AppendedFile(path, head, most_waiting_bytes)

    def get_logdir(self) -> str:
        return self._directory

    def add_event(self, event: Event) -> None:
        self._file.add(_record(event))

    def flush(self) -> None:
        """Writes what waits. Raises OSError when that is not possible now."""
        self._file.flush()

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
