"""A run's log for programs: a file beside the run with one JSON object in each line, which holds everything."""

from __future__ import annotations

import json
import math
from collections import deque
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

FILE_NAME = "log.jsonl"
MOST_WAITING_BYTES = 64 << 20


class JsonLog:
    """Appends to `log.jsonl`: a run that continues another adds to the same file.

    Every line has `time` (ISO 8601, with the offset from UTC) and `kind`, which says what else there is: "start" (all
    flags), "iteration" (of each log line: all figures, and the spikes of each layer), "validation", "scalars" (of a
    profile), "memory_predicted" and "memory", "message" (what the terminal shows beside that). JSON has no word for
    values that are not finite: they are the strings "nan", "inf" and "-inf".

    Args:
        directory: where the file goes; None writes nothing.
        most_waiting_bytes: beyond these the oldest lines that wait are dropped.

    Attributes:
        path: of the file.
    """

    def __init__(self, directory: str | Path | None, most_waiting_bytes: int = MOST_WAITING_BYTES) -> None:
        self.path = None if directory is None else Path(directory) / FILE_NAME
        self._waiting, self._bytes, self._most = deque[bytes](), 0, most_waiting_bytes

    def add(self, kind: str, values: Mapping[str, Any]) -> None:
        """Adds a line, which waits in memory until `flush`."""
        if self.path is None:
            return
        line = {"time": datetime.now().astimezone().isoformat(timespec="seconds"), "kind": kind, **values}
        self._waiting.append((json.dumps(_finite(line), allow_nan=False) + "\n").encode())
        self._bytes += len(self._waiting[-1])
        while self._bytes > self._most and len(self._waiting) > 1:
            self._bytes -= len(self._waiting.popleft())

    def flush(self) -> None:
        """Writes what waits. Raises OSError when that is not possible now; then nothing of it is in the file."""
        if self.path is None:
            return
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with open(self.path, "ab", buffering=0) as file:
            end, text = file.tell(), b"".join(self._waiting)
            try:
                written = file.write(text)
                if written < len(text):  # the last bytes of a disk; the next ones tell the reason
                    file.write(text[written:])
            except OSError:
                file.truncate(end)
                raise
        self._waiting.clear()
        self._bytes = 0


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, Mapping):
        return {key: _finite(each) for key, each in value.items()}
    return [_finite(each) for each in value] if isinstance(value, list | tuple) else value
