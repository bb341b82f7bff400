"""Files that webdataset opens by another program: object stores, sftp, and the output of a command.

webdataset has no opener for s3://; its pages tell people to write the command that stands here.
"""

from __future__ import annotations

import os
import select
import subprocess
import threading
from collections.abc import Iterator
from typing import Any

from megasnn.data.remote.address import scheme_of, shown
from megasnn.data.remote.incoming import BLOCK, FetchError, Incoming, Interrupted, Pace, persist

TRIES = 3
_S3 = ("aws", "s3", "cp", "--quiet")


def require_opener(url: str) -> None:
    """Raises ValueError for a URL that nothing opens."""
    from webdataset.gopen import gopen_schemes  # imports torch

    known = sorted({*gopen_schemes, "s3"} - {"__default__"})
    if scheme_of(url) not in known:
        raise ValueError(f"{shown(url)}: no opener for {scheme_of(url)}:; there are {', '.join(known)}")


def rewritten(url: str) -> str:
    """What GOPEN_REWRITE, an environment variable of webdataset, makes of a URL."""
    if "GOPEN_REWRITE" not in os.environ:
        return url
    from webdataset.gopen import rewrite_url

    return rewrite_url(url)


def fetch_opened(url: str, incoming: Incoming, seconds: float, stop: threading.Event, tries: int = TRIES) -> None:
    """Fetches what webdataset opens; a program that fails is started again.

    Args:
        url: `rewritten`.
        seconds: of silence after which a program is ended.
    Raises:
        FetchError: it cannot be had. OSError: it cannot be written.
    """

    def receive() -> None:
        incoming.restart()
        for block in _blocks(url, incoming.name, seconds, stop):
            incoming.add(block)

    persist(receive, incoming, tries, stop)


def _blocks(url: str, name: str, seconds: float, stop: threading.Event) -> Iterator[bytes]:
    from webdataset.gopen import Pipe

    stream = _open(url, name)
    if not isinstance(stream, Pipe):  # a file that GOPEN_REWRITE named, or what the user's own opener gives
        with stream:
            yield from iter(lambda: stream.read(BLOCK), b"")
        return
    try:
        yield from _output(stream, seconds, stop)
        try:
            status = stream.proc.wait(seconds)
        except subprocess.TimeoutExpired:
            raise Interrupted(f"its program does not end, {seconds:g} s after its output (--fetch-timeout)") from None
        if status:
            raise Interrupted(f"its program ended with status {status}, and says why above, if it does")
    finally:
        stream.proc.kill()
        stream.stream.close()
        stream.proc.wait()


def _open(url: str, name: str) -> Any:
    from webdataset.gopen import Pipe, gopen, gopen_schemes

    try:
        if scheme_of(url) == "s3" and "s3" not in gopen_schemes:
            return Pipe([*_S3, url, "-"], mode="rb", bufsize=BLOCK)
        return gopen(url, "rb", bufsize=BLOCK)
    except FileNotFoundError as error:
        raise FetchError(f"cannot fetch {name}: {error.filename} is not there; install it, or mount the data") from None
    except (ValueError, ImportError) as error:  # WDS_SECURE; huggingface_hub is not installed
        raise FetchError(f"cannot fetch {name}: {error}") from None


def _output(stream: Any, seconds: float, stop: threading.Event) -> Iterator[bytes]:
    """What a program writes. Raises Interrupted where it is silent."""
    descriptor, pace = stream.stream.fileno(), Pace(seconds)
    ready = select.poll()
    ready.register(descriptor, select.POLLIN)
    while not stop.is_set():
        if not ready.poll(1000 * seconds):
            raise Interrupted(f"its program writes nothing for {seconds:g} s (--fetch-timeout)")
        if not (block := os.read(descriptor, BLOCK)):
            return
        yield block
        pace.require(len(block))
    raise FetchError("stopped")
