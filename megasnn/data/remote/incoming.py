"""A file on its way into the cache: counted, hashed, bounded, and given up where it comes too slowly."""

from __future__ import annotations

import hashlib
import sys
import threading
import time
from collections.abc import Callable
from typing import BinaryIO

BLOCK = 1 << 20
_SLOWEST = 1000  # bytes a second


class FetchError(ValueError):
    """What a URL stands for cannot be had. The message names the URL and what to do."""


class NotFoundError(FetchError):
    """The server answers that there is no such file, or none for this user."""


class ToolError(FetchError):
    """A program is missing or failed, and did not say whether there is such a file."""


class Interrupted(Exception):
    """The source failed in a way that may pass: what has arrived stays, and it is asked again.

    Attributes:
        wait: seconds to wait at least, as the source asks.
        outcome: what is raised where it does not pass.
    """

    def __init__(self, problem: object, wait: float = 0.0, outcome: type[FetchError] = FetchError) -> None:
        super().__init__(problem)
        self.wait, self.outcome = wait, outcome


class Incoming:
    """What has arrived of a file.

    Args:
        name: of its source, for messages.
        file: is written to; empty.
        most: bytes that it may have. `reason`: who says so, and what to do, for the message.
        arrived: is told how many bytes have come, or (negative) are thrown away.

    Attributes:
        size: bytes that have arrived. furthest: the most that had arrived at any time.
    """

    def __init__(
        self, name: str, file: BinaryIO, most: int, reason: str, arrived: Callable[[int], object] = lambda count: None
    ) -> None:
        self.name, self.most, self._reason = name, most, reason
        self._file, self._arrived = file, arrived
        self._digest = hashlib.sha256()
        self.size = self.furthest = 0

    def add(self, block: bytes) -> None:
        """Raises FetchError for more than there may be, OSError where it cannot be written."""
        self.require_size(self.size + len(block))
        self._file.write(block)
        self._digest.update(block)
        self.size += len(block)
        self.furthest = max(self.furthest, self.size)
        self._arrived(len(block))

    def require_size(self, size: int) -> None:
        """Raises FetchError where a file of this size, or more, may not come."""
        if size > self.most:
            raise FetchError(f"{self.name} has more than {self.most} bytes, {self._reason}")

    def restart(self) -> None:
        """Throws away what has arrived."""
        self._arrived(-self.size)
        self._file.seek(0)
        self._file.truncate()
        self._digest, self.size = hashlib.sha256(), 0

    @property
    def sha256(self) -> str:
        return self._digest.hexdigest()


class Pace:
    """How fast a source sends. `seconds`: it must send something in each so long a time, and a little on average."""

    def __init__(self, seconds: float) -> None:
        self._seconds, self._since, self._bytes = seconds, time.monotonic(), 0

    def require(self, count: int) -> None:
        """After so many more bytes. Raises Interrupted where they come too slowly."""
        self._bytes += count
        passed = time.monotonic() - self._since
        if passed < self._seconds:
            return
        if self._bytes < _SLOWEST * passed:
            raise Interrupted(f"{self._bytes} bytes in {passed:.0f} s are too slow (--fetch-timeout)")
        self._since, self._bytes = time.monotonic(), 0


def persist(receive: Callable[[], object], incoming: Incoming, tries: int, stop: threading.Event) -> None:
    """Calls `receive`, which raises Interrupted where it comes to no end, until it does.

    Args:
        tries: in a row that bring nothing new, after which it is given up.
        stop: ends the waiting between them.
    Raises:
        FetchError: it is given up (as what the last Interrupted says), or `stop` is set.
    """
    fruitless = 0
    while True:
        before = incoming.furthest
        try:
            receive()
            return
        except Interrupted as error:
            fruitless = 0 if incoming.furthest > before else fruitless + 1
            if fruitless == tries:
                raise error.outcome(
                    f"cannot fetch {incoming.name}: {error} ({tries} tries brought nothing new, "
                    f"{incoming.furthest} bytes at most); start the run again when its source answers"
                ) from None
            pause = min(60.0, max(error.wait, _FIRST_PAUSE * 2**fruitless if fruitless else 0.0))
            if fruitless > 1:
                sys.stderr.write(f"cannot fetch {incoming.name} yet: {error}; trying again in {pause:g} s\n")
        if stop.wait(pause):
            raise FetchError(f"fetching {incoming.name} was stopped")


_FIRST_PAUSE = 0.25  # seconds
