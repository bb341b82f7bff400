"""SIGTERM, SIGINT and SIGUSR1: a training run saves at the end of its step and ends; a second one ends it at once.

Signals are read in a thread, so that they are noticed while the main thread is inside a collective. Outside of training
there is nothing to save: then a signal ends the process at once, and says so.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from types import TracebackType

from megasnn.process.early import SIGNALS
from megasnn.process.fault import CAUSE_SECONDS, is_ending, tell_end

# A launcher passes on what the terminal has sent to all processes already: that is one request, not two.
SAME_REQUEST_SECONDS = 1.0


class StopSignals:
    """Context manager: within it the signals ask the run to stop; `requested` names the first one that came.

    Only the main thread of a program can handle signals; anywhere else nothing is ever requested.
    """

    def __init__(self, rank: int) -> None:
        self._rank, self._training = rank, False
        self._requested_at = 0.0
        self.requested: str | None = None

    def listen(self) -> None:
        """From here on signals are noticed."""
        if threading.current_thread() is not threading.main_thread():
            return
        reading, writing = os.pipe()
        os.set_blocking(writing, False)
        for number in SIGNALS:
            # The interpreter runs handlers between bytecodes of the main thread only; the wake-up pipe is written at
            # once. Without a handler it would not be.
            signal.signal(number, lambda *_: None)
        signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
        threading.Thread(target=self._read, args=(reading,), name="megasnn-signals", daemon=True).start()

    @property
    def status(self) -> int:
        """The exit status of this rank where the request leaves nothing that counts."""
        return 1 if self.requested is None else 128 + signal.Signals[self.requested]

    def __enter__(self) -> StopSignals:
        self._training = True
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._training = False

    def _read(self, pipe: int) -> None:
        with open(pipe, "rb", buffering=0) as stream:
            while numbers := stream.read(64):  # until the other end is closed
                for number in numbers:  # other signals come through the pipe too
                    if number in SIGNALS:
                        self._take(signal.Signals(number))

    def _take(self, number: signal.Signals) -> None:
        if not self._training:
            cause = "the user asked for it, another rank ended, or the job was cancelled"
            self._end(number, f"told to stop ({number.name}): {cause}")
        elif self.requested is None:
            self.requested, self._requested_at = number.name, time.monotonic()
            # A launcher sends SIGTERM when another rank is gone, and then nothing can be saved any more.
            time.sleep(CAUSE_SECONDS)
            if not is_ending():
                text = f"{number.name}: the run ends after this step or evaluated batch; once more ends it at once"
                sys.stderr.write(f"[rank {self._rank}] {text}\n")
        elif time.monotonic() - self._requested_at > SAME_REQUEST_SECONDS:
            # torchrun sends SIGTERM, whichever signal it gets the second time.
            again = "again" if number.name == self.requested else f"after {self.requested}, perhaps a launcher's for it"
            self._end(number, f"{number.name} {again}: ending at once; what was saved before stays")

    def _end(self, number: signal.Signals, text: str) -> None:
        tell_end(self._rank, text)
        os._exit(128 + number)
