"""Files that another program fetches: from object stores, by sftp, and the output of a command."""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Iterator
from contextlib import closing
from typing import Any

from megasnn.data.remote.address import PIPE, is_command, scheme_of, shown
from megasnn.data.remote.incoming import BLOCK, FetchError, Incoming, Interrupted, NotFoundError, ToolError, persist
from megasnn.data.remote.programs import AWS, OF_OPENERS, URL, Program
from megasnn.data.remote.running import Running, start_guarded
from megasnn.files.described import printable

TRIES = 3


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


def is_on_hub(url: str) -> bool:
    """Whether Hugging Face's hub has it, and no script has put another opener in place of webdataset's."""
    return scheme_of(url) == "hf" and _own_opener(url) == "gopen_hf"


def fetch_opened(url: str, incoming: Incoming, seconds: float, stop: threading.Event) -> None:
    """Fetches what webdataset opens; a program that fails is started again.

    Args:
        url: `rewritten`.
        seconds: of silence after which a program is ended.
    Raises:
        NotFoundError, ToolError, FetchError: it cannot be had. OSError: it cannot be written.
    """

    def receive() -> None:
        incoming.restart()
        for block in _blocks(url, incoming.name, seconds, stop):
            incoming.add(block)

    persist(receive, incoming, TRIES, stop)


def _blocks(url: str, name: str, seconds: float, stop: threading.Event) -> Iterator[bytes]:
    source = _open(url, name)
    if not isinstance(source, Running):
        with source:
            yield from iter(lambda: source.read(BLOCK), b"")
        return
    with closing(source) as running:
        yield from running.output(seconds, stop)
        if status := running.status(seconds):
            raise _failure(url, name, status, running.errors)


def _open(url: str, name: str) -> Running | Any:
    """A program that was started; or a file, where GOPEN_REWRITE named one or the user's own opener gives one."""
    if is_command(url):
        return _start_command(url, name)
    if program := _program(url):
        return _start(program, url, name)
    from webdataset.gopen import Pipe, gopen

    try:
        stream = gopen(url, "rb", bufsize=BLOCK)
    except FileNotFoundError as error:
        kind = NotFoundError if scheme_of(url) in ("", "file") else ToolError
        raise kind(f"cannot fetch {name}: {error.filename} is not there; install it, or mount the data") from None
    except (ValueError, ImportError) as error:
        raise FetchError(f"cannot fetch {name}: {error}") from None
    return Running(stream.proc, f"the program for {name}", leads_group=False) if isinstance(stream, Pipe) else stream


def _program(url: str) -> Program | None:
    """What fetches a URL; None for a command, and for what a script has put among webdataset's openers."""
    if scheme_of(url) == "s3" and _opener(url) is None:
        return AWS
    return OF_OPENERS.get(_own_opener(url))


def _own_opener(url: str) -> str:
    """The name of webdataset's own opener for a URL; "" where that is not what opens it."""
    opener = _opener(url)
    return opener.__name__ if getattr(opener, "__module__", "") == "webdataset.gopen" else ""


def _opener(url: str) -> Any:
    from webdataset.gopen import gopen_schemes

    return gopen_schemes.get(scheme_of(url))


def _start(program: Program, url: str, name: str) -> Running:
    command = [url if part == URL else part for part in program.command]
    if shutil.which(command[0]) is None:
        raise ToolError(
            f"cannot fetch {name}: {command[0]} is not there; install it ({program.install}), or mount the data"
        )
    return Running(start_guarded(command, keeps_errors=True), _in_words(program, url), leads_group=True)


def _start_command(url: str, name: str) -> Running:
    from webdataset import utils

    if utils.enforce_security:
        raise FetchError(f"cannot fetch {name}: WDS_SECURE forbids commands; unset it")
    command = ["sh", "-c", url.removeprefix(PIPE)]
    return Running(start_guarded(command, keeps_errors=False), f"`{shown(url)}`", leads_group=True)


def _failure(url: str, name: str, status: int, errors: str) -> Exception:
    """What a status other than 0 means."""
    program = None if is_command(url) else _program(url)
    if program is None:
        return Interrupted(f"its program ended with status {status}, and says why above, if it does")
    lines = [line.strip() for line in errors.splitlines() if line.strip()]
    said = printable(lines[-1].replace(url, shown(url))) if lines else "it does not say why"
    problem = f"{_in_words(program, url)} ended with status {status}: {said}"
    if program.not_there and program.not_there.search(errors):
        return NotFoundError(f"cannot fetch {name}: {problem}; correct the address (braces and numbers too)")
    return Interrupted(problem + program.hint(errors), outcome=ToolError)


def _in_words(program: Program, url: str) -> str:
    return f"`{' '.join(shown(url) if part == URL else part for part in program.command)}`"
