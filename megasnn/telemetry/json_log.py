"""A run's log for programs: a file beside the run with one JSON object in each line, which holds everything."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

from megasnn.telemetry.tried import MOST_WAITING_BYTES, AppendedFile

FILE_NAME = "log.jsonl"


class JsonLog:
    """Appends to `log.jsonl`: a run that continues another adds to the same file.

    Every line has `time` (ISO 8601, with the offset from UTC) and `kind`, which says what else there is: "start" (all
    flags), "iteration" (of each log line: all figures, and the spikes of each layer), "validation", "scalars" (of a
    profile), "memory_predicted" and "memory", "message" (what the terminal shows beside that). JSON has no word for
    values that are not finite: they are the strings "nan", "inf" and "-inf".

    Args:
        directory: where the file goes; None writes nothing.
        most_waiting_bytes: see `AppendedFile`.

    Attributes:
        path: of the file.
    """

    def __init__(self, directory: str | Path | None, most_waiting_bytes: int = MOST_WAITING_BYTES) -> None:
        self.path = None if directory is None else Path(directory) / FILE_NAME
        self._file = None if self.path is None else AppendedFile(self.path, most_waiting_bytes=most_waiting_bytes)

    def add(self, kind: str, values: Mapping[str, Any]) -> None:
        """Adds a line, which waits in memory until `flush`."""
        if self._file is not None:
            line = {"time": datetime.now().astimezone().isoformat(timespec="seconds"), "kind": kind, **values}
            self._file.add((json.dumps(_finite(line), allow_nan=False) + "\n").encode())

    def flush(self) -> None:
        """Writes what waits. Raises OSError when that is not possible now."""
        if self._file is not None:
            self._file.flush()


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, Mapping):
        return {key: _finite(each) for key, each in value.items()}
    return [_finite(each) for each in value] if isinstance(value, list | tuple) else value
