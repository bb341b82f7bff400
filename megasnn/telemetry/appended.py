"""A file beside a run that outlives a full disk, and a folder that is removed or cannot be written."""

from __future__ import annotations

from collections import deque
from pathlib import Path

MOST_WAITING_BYTES = 64 << 20


class AppendedFile:
    """Records wait in memory until `flush`, which alone touches the disk, in the calling thread.

    Where it fails, the file ends with its last whole record, as before, and what waits is written by the next `flush`
    that succeeds.

    Args:
        head: what an empty file begins with.
        most_waiting_bytes: beyond these the oldest records that wait are dropped.

    Attributes:
        path: of the file.
    """

    def __init__(self, path: Path, head: bytes = b"", most_waiting_bytes: int = MOST_WAITING_BYTES) -> None:
        self.path, self._head, self._most = path, head, most_waiting_bytes
        self._waiting, self._bytes = deque[bytes](), 0

    def add(self, record: bytes) -> None:
        self._waiting.append(record)
        self._bytes += len(record)
        while self._bytes > self._most and len(self._waiting) > 1:
            self._bytes -= len(self._waiting.popleft())

    def flush(self) -> None:
        """Writes what waits. Raises OSError when that is not possible now; then nothing of it is in the file."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with open(self.path, "ab", buffering=0) as file:  # opened each time: it may have been removed
            end = file.tell()
            records = memoryview(b"".join(self._waiting if end else (self._head, *self._waiting)))
            try:
                while records:  # a disk takes its last bytes first, and then says that it is full
                    records = records[file.write(records) :]
            except OSError:
                file.truncate(end)
                raise
        self._waiting.clear()
        self._bytes = 0
