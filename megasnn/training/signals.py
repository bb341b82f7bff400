"""SIGTERM, SIGINT and SIGUSR1: a training run saves at the end of its step and ends; a second one ends it at once."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from contextlib import ExitStack
from types import FrameType, TracebackType

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
SAME_REQUEST_SECONDS = 1.0
"""A launcher passes on what the terminal has sent to all processes already: that is one request, not two."""


class StopSignals:
    """Context manager: within it the signals ask the run to stop; `requested` names the first one that came.

    Only the main thread of a program can handle signals; anywhere else nothing is ever requested.
    """

    def __init__(self) -> None:
        self.requested: str | None = None
        self._requested_at = 0.0
        self._handlers = ExitStack()

    @property
    def status(self) -> int:
        """The exit status of this rank where the request leaves nothing that counts."""
        return 1 if self.requested is None else 128 + signal.Signals[self.requested]

    def __enter__(self) -> StopSignals:
        if threading.current_thread() is threading.main_thread():
            for number in SIGNALS:
                if signal.getsignal(number) is not signal.SIG_IGN:  # as nohup has it
                    self._handlers.callback(signal.signal, number, signal.signal(number, self._take))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._handlers.close()

    def _take(self, number: int, frame: FrameType | None) -> None:
        name = signal.Signals(number).name
        if self.requested is None:
            self.requested, self._requested_at = name, time.monotonic()
            # torchrun sends SIGTERM when another rank has failed: then nothing can be saved, and nothing is promised.
            if number != signal.SIGTERM and os.environ.get("LOCAL_RANK", "0") == "0":
                text = f"{name}: the run ends after this step or evaluated batch; once more ends it at once\n"
                sys.stderr.write(text)
        elif time.monotonic() - self._requested_at > SAME_REQUEST_SECONDS:
            sys.stderr.write(f"{name} after {self.requested}: ending at once; what was saved before stays\n")
            os._exit(128 + number)
