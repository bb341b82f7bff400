"""Console and log.jsonl. Their failures never end a run."""

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

from tqdm import tqdm

FILE_NAME = "log.jsonl"


class BestEffort:
    """Turns reporting errors into warnings, one by name: ``with best_effort("drawing"): ...``.

    The block must not contain a collective: other ranks would wait for the failed one.
    """

    def __init__(self, warn: Callable[[str], None]) -> None:
        self._warn = warn
        self._failed: set[str] = set()

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            if name not in self._failed:
                self._failed.add(name)
                self._warn(f"WARNING: {name} failed ({type(error).__name__}: {error}); training goes on")


class JsonLog:
    """Appends JSON objects, one a line, to a directory's `log.jsonl`. None disables the log.

    Every line has `time` (ISO 8601 with UTC offset) and `kind`: "start" (all flags), "iteration" (log line and layer
    spikes), "validation", "memory_predicted", "memory" or "message". nan and infinities are strings: "nan", "inf",
    "-inf".
    """

    def __init__(self, directory: str | Path | None) -> None:
        self.path = None if directory is None else Path(directory) / FILE_NAME

    def add(self, kind: str, values: Mapping[str, Any]) -> None:
        """Raises OSError."""
        if self.path is None:
            return
        line = {"time": datetime.now().astimezone().isoformat(timespec="seconds"), "kind": kind, **values}
        text = json.dumps(_finite(line), allow_nan=False) + "\n"
        self.path.parent.mkdir(parents=True, exist_ok=True)
        # Closed after each line: a killed run has lost none.
        with open(self.path, "a", encoding="utf-8") as file:
            file.write(text)


def _finite(value: Any) -> Any:
    # JSON has neither nan nor infinity.
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, Mapping):
        return {key: _finite(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(each) for each in value]
    return value


class Console:
    """Lines on stdout, and a bar below them where stderr is a terminal.

    A closed pipe silences it and does not end the run.
    """

    def __init__(self, quiet: bool = False) -> None:
        self._quiet = quiet
        self._bar: tqdm[Any] | None = None

    @property
    def is_terminal(self) -> bool:
        return sys.stdout.isatty()

    def advance(self, iteration: int, iterations: int) -> None:
        """Moves the bar by one step, to `iteration`."""
        if self._quiet:
            return
        if self._bar is None:
            # None disables the bar where stderr is a file.
            self._bar = tqdm(
                initial=iteration - 1, total=iterations, unit="step", dynamic_ncols=True, leave=False, disable=None
            )
        self._bar.update()

    def close_bar(self) -> None:
        if self._bar is not None:
            self._bar.close()
            self._bar = None

    def line(self, text: str) -> None:
        if self._quiet:
            return
        try:
            # Clears the bar, and draws it again below the line.
            with tqdm.external_write_mode():
                print(text, flush=True)
        except OSError:
            # The pipe is closed. Python flushes stdout once more at exit, so that must not fail either.
            self._quiet = True
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
