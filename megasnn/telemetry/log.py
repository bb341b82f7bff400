"""Outputs of a run that must never end it: the console and log.jsonl."""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any

FILE_NAME = "log.jsonl"


class BestEffort:
    """Contexts around reporting: an error in one is told once for each name, and goes no further.

    Nothing in which ranks wait for each other may stand in such a context: a rank would be missed there.
    """

    def __init__(self, tell: Callable[[str], None]) -> None:
        self._tell = tell
        self._failed: set[str] = set()

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """`name`: of what is tried, for the warning."""
        try:
            yield
        except Exception as error:
            if name not in self._failed:
                self._failed.add(name)
                self._tell(f"WARNING: {name} failed ({type(error).__name__}: {error}); training goes on")


class JsonLog:
    """Appends to `log.jsonl` beside a run: one JSON object a line; a run that continues another adds to its file.

    Every line has `time` (ISO 8601 with the offset from UTC) and `kind`: "start" (all flags), "iteration" (figures of a
    log line and the spikes of each layer), "validation", "memory_predicted", "memory" and "message". Values that are
    not finite are the strings "nan", "inf" and "-inf". Without a directory nothing is written.
    """

    def __init__(self, directory: str | Path | None) -> None:
        self.path = None if directory is None else Path(directory) / FILE_NAME

    def add(self, kind: str, values: Mapping[str, Any]) -> None:
        """Writes a line. Raises OSError when that fails."""
        if self.path is None:
            return
        line = {"time": datetime.now().astimezone().isoformat(timespec="seconds"), "kind": kind, **values}
        text = json.dumps(_finite(line), allow_nan=False) + "\n"
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with open(self.path, "a", encoding="utf-8") as file:
            file.write(text)


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, Mapping):
        return {key: _finite(each) for key, each in value.items()}
    return [_finite(each) for each in value] if isinstance(value, list | tuple) else value


class Console:
    """Lines on standard output. A closed pipe behind it silences them; it ends nothing."""

    def __init__(self, quiet: bool = False) -> None:
        self._quiet = quiet

    def line(self, text: str) -> None:
        if self._quiet:
            return
        try:
            print(text, flush=True)
        except OSError:  # a closed pipe; what Python flushes at exit must not fail on it either
            self._quiet = True
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
