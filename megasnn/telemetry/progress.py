"""Progress bars on standard error where that is a terminal, and log lines that do not tear them."""

from __future__ import annotations

import sys
import threading
from types import TracebackType
from typing import Any

from tqdm import tqdm


def byte_bar(title: str, size: int | None, quiet: bool = False) -> tqdm[Any]:
    """A bar that counts up to `size` bytes: `update(bytes)`.

    Args:
        size: None where nobody knows it yet.
        quiet: shows nothing at all, for the ranks that do not speak.
    """
    _lock_in_this_process()
    disable = True if quiet else None
    return tqdm(
        total=size, desc=title, unit="B", unit_scale=True, unit_divisor=1024, disable=disable, dynamic_ncols=True
    )


class Progress:
    """Counts iterations: the bar on standard error where that is a terminal, lines on standard output.

    Args:
        total: iterations of the whole run.
        done: iterations that an earlier part of the run has already made.
        quiet: shows nothing at all, for the ranks that do not speak.
    """

    def __init__(self, total: int, done: int = 0, quiet: bool = False) -> None:
        self._quiet = quiet
        self._bar: tqdm[Any] | None = None
        if not quiet and sys.stderr.isatty():
            _lock_in_this_process()
            self._bar = tqdm(total=total, initial=done, file=sys.stderr, desc="training", unit="it", dynamic_ncols=True)

    def advance(self, **figures: str | float) -> None:
        """One more iteration; `figures` are shown at the end of the bar."""
        if self._bar is None:
            return
        if figures:
            self._bar.set_postfix(figures, refresh=False)
        self._bar.update(1)

    def line(self, text: str) -> None:
        """Prints a line above the bar."""
        if self._quiet:
            return
        if self._bar is None:
            print(text, flush=True)
        else:
            self._bar.write(text, file=sys.stdout)
            sys.stdout.flush()

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()
            self._bar = None

    def __enter__(self) -> Progress:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _lock_in_this_process() -> None:
    """In place of tqdm's lock between processes, which is left over when one is killed."""
    tqdm.set_lock(threading.RLock())
