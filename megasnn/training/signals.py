"""Signals that ask a run to stop. The first lets it save and end after its step; a second ends it at once."""

from __future__ import annotations

import atexit
import os
import signal
import sys
import threading
import time
from contextlib import ExitStack
from types import FrameType, TracebackType

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
SAME_REQUEST_SECONDS = 1.0
"""A launcher repeats a signal that the terminal has already sent to all processes. Both are one request."""


class StopSignals:
    """Context manager within which signals ask the run to stop.

    Only a program's main thread can handle signals; in other threads nothing is ever requested.

    Attributes:
        requested: first signal's name; None before.
    """

    def __init__(self) -> None:
        self.requested: str | None = None
        self._requested_at = 0.0
        self._handlers = ExitStack()

    @property
    def status(self) -> int:
        """This rank's exit status when the stop leaves no result."""
        return 1 if self.requested is None else 128 + signal.Signals[self.requested]

    def __enter__(self) -> StopSignals:
        if threading.current_thread() is threading.main_thread():
            for number in SIGNALS:
                if signal.getsignal(number) is not signal.SIG_IGN:
                    # nohup ignores signals, and so does the run.
                    self._handlers.callback(signal.signal, number, signal.signal(number, self._receive))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._handlers.close()
        if threading.current_thread() is threading.main_thread():
            # Keeps a finished run's exit status while the interpreter ends.
            atexit.register(_ignore_signals)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        name = signal.Signals(number).name
        if self.requested is None:
            self.requested = name
            self._requested_at = time.monotonic()
            # torchrun sends SIGTERM when another rank has failed. Then the run cannot save, and promises nothing.
            if number != signal.SIGTERM and os.environ.get("LOCAL_RANK", "0") == "0":
                text = f"{name}: the run ends after this step or evaluated batch; once more ends it at once\n"
                sys.stderr.write(text)
        elif time.monotonic() - self._requested_at > SAME_REQUEST_SECONDS:
            sys.stderr.write(f"{name} after {self.requested}: ending at once; what was saved before stays\n")
            # Without cleaning up, which could wait for other ranks.
            os._exit(128 + number)


def _ignore_signals() -> None:
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)
