"""Standard output and standard error that never end a program: `pretrain ... | head`, a full disk under a log file."""

from __future__ import annotations

import io
import os
import select
import sys
from collections.abc import Callable
from typing import Any, TextIO


class _Sink(io.FileIO):
    """A file descriptor. What cannot be written is dropped; the next write is tried again.

    Args:
        tell: is given the first error.
    """

    def __init__(self, descriptor: int, tell: Callable[[OSError], object]) -> None:
        super().__init__(descriptor, "w", closefd=False)
        self._tell, self._lost = tell, False

    def write(self, data: Any) -> int:
        try:
            while (written := super().write(data)) is None:  # another process made the pipe non-blocking
                select.select([], [self], [])
            return written
        except OSError as error:
            if not self._lost:
                self._lost = True
                self._tell(error)
            return memoryview(data).nbytes


def keep_going(goes_on: Callable[[], bool] = lambda: False) -> None:
    """From here on nothing that is printed raises an error, neither now nor when the interpreter ends.

    Streams that somebody else has put in place, such as a test or a notebook, stay as they are.

    Args:
        goes_on: whether the program has more to do than print; then standard error tells that standard output is lost.
    """

    def tell(error: OSError) -> None:
        if goes_on():
            sys.stderr.write(f"WARNING: standard output cannot be written ({error.strerror}); the run goes on\n")

    if sys.stdout is sys.__stdout__:
        sys.stdout = _stream(sys.stdout, 1, tell)
    if sys.stderr is sys.__stderr__:
        sys.stderr = _stream(sys.stderr, 2, lambda error: None)


def _stream(old: TextIO | None, descriptor: int, tell: Callable[[OSError], object]) -> TextIO:
    """The same descriptor as a stream that does not fail; for a descriptor that was closed (`>&-`), the null device."""
    if old is None:
        return open(os.devnull, "w")
    raw = _Sink(descriptor, tell)
    lines = descriptor == 2 or old.isatty() or bool(os.environ.get("PYTHONUNBUFFERED"))
    return io.TextIOWrapper(io.BufferedWriter(raw), old.encoding, "backslashreplace", line_buffering=lines)
