"""A program that writes a file: watched while it works, and ended with all that it has started."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence

from megasnn.data.remote.incoming import BLOCK, FetchError, Interrupted, Pace

SIGN_SECONDS = 30.0
"""A program that is silent is spoken of each time that so long has passed."""
_LOOK_SECONDS = 0.5
_END_SECONDS = 0.02
_KEPT_CHARACTERS = 4096  # of what it writes to standard error
# The shell waits for the program. Beside it, a second one waits for the end of standard input, which comes when this
# process ends, however it does: then it kills the group, in which there is nothing else of this run.
_GUARDED = """
exec 3<&0 </dev/null
{ read -r _ <&3; kill -KILL 0; } >/dev/null 2>&1 &
guard=$!
"$@" 3<&-
status=$?
{ kill $guard; wait $guard; } 2>/dev/null
exit $status
"""


def start_guarded(command: Sequence[str], keeps_errors: bool) -> subprocess.Popen[bytes]:
    """Starts a program in a session and group of its own, which end with this process. It reads nothing.

    Args:
        keeps_errors: its standard error can be read; otherwise the user sees it.
    """
    return subprocess.Popen(
        ["sh", "-c", _GUARDED, "sh", *command],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE if keeps_errors else None,
        bufsize=0,
        start_new_session=True,
    )


class Running:
    """A program that was started, to be closed.

    Args:
        shown: the command, as messages name it.
        leads_group: what it has started ends with it.
    Attributes:
        errors: the end of what it has written to standard error, where that can be read.
    """

    def __init__(self, process: subprocess.Popen[bytes], shown: str, leads_group: bool) -> None:
        assert process.stdout is not None
        self._process, self._shown, self._leads_group = process, shown, leads_group
        self._output, self._streams = process.stdout.fileno(), select.poll()
        self.errors = ""
        for stream in (process.stdout, process.stderr):
            if stream is not None:
                self._streams.register(stream, select.POLLIN)

    def output(self, seconds: float, stop: threading.Event) -> Iterator[bytes]:
        """What the program writes, in blocks.

        Args:
            seconds: of silence after which it is given up. stop: ends it.
        Raises:
            Interrupted: it is silent, or too slow. FetchError: it was stopped.
        """
        heard, told, pace = time.monotonic(), 0.0, Pace(seconds)
        while not stop.is_set():
            block = self._look(min(seconds, _LOOK_SECONDS))
            if block is not None:
                if not block:
                    return
                yield block
                pace.require(len(block))
                heard, told = time.monotonic(), 0.0
                continue
            silent = time.monotonic() - heard
            if silent >= seconds:
                raise Interrupted(f"{self._shown} writes nothing for {seconds:g} s (--fetch-timeout)")
            if silent >= told + SIGN_SECONDS:
                told = silent
                sys.stderr.write(f"waiting for {self._shown} since {silent:.0f} s, for at most {seconds:g} s\n")
        raise FetchError("stopped")

    def status(self, seconds: float) -> int:
        """How it has ended. Raises Interrupted where it does not, so many seconds after its output."""
        end = time.monotonic() + seconds
        while self._process.poll() is None:
            self._look(_END_SECONDS)
            if time.monotonic() > end:
                raise Interrupted(f"{self._shown} does not end, {seconds:g} s after its output (--fetch-timeout)")
        self._look(0.0)
        return self._process.returncode

    def close(self) -> None:
        """Ends it, unless it has ended by itself."""
        if self._process.poll() is None:
            if self._leads_group:
                os.killpg(self._process.pid, signal.SIGKILL)
            else:
                self._process.kill()
        for stream in (self._process.stdin, self._process.stdout, self._process.stderr):
            if stream is not None:
                stream.close()
        self._process.wait()

    def _look(self, seconds: float) -> bytes | None:
        """Waits a moment for what it writes: gives a block of its output, b"" at the end of that, None for neither."""
        block = None
        for descriptor, _ in self._streams.poll(1000 * seconds):
            found = os.read(descriptor, BLOCK)
            if not found:
                self._streams.unregister(descriptor)
            if descriptor == self._output:
                block = found
            else:
                self.errors = (self.errors + found.decode(errors="replace"))[-_KEPT_CHARACTERS:]
        return block
