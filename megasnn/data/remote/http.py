"""Files by HTTP: a connection that breaks off is taken up where it ended, if the server can do that.

webdataset starts `curl` for them, which begins anew after a break and cannot tell that a shard is another one by then.
"""

from __future__ import annotations

import base64
import http.client
import re
import ssl
import threading
from collections.abc import Iterator
from email.message import Message
from typing import IO, Any
from urllib.error import HTTPError, URLError
from urllib.parse import unquote, urlsplit, urlunsplit
from urllib.request import HTTPRedirectHandler, Request, build_opener

from megasnn.data.remote.address import is_http, shown
from megasnn.data.remote.incoming import BLOCK, FetchError, Incoming, Interrupted, NotFoundError, Pace, persist

TRIES = 8  # a minute, with the pauses between them
_MAY_PASS = (408, 425, 429)
_NOT_THERE = (403, 404, 410)
_PARTIAL, _NO_SUCH_RANGE = 206, 416


def fetch_http(
    url: str, incoming: Incoming, seconds: float, stop: threading.Event, authorization: str | None = None
) -> None:
    """Fetches a file of http(s).

    Args:
        seconds: of silence, or of less than a kilobyte each, after which a connection counts as broken.
        authorization: a header for the server of the URL, and none that it leads to; by default user and password of
            the URL.
    Raises:
        NotFoundError, FetchError: it cannot be had.
        OSError: it cannot be written.
    """
    persist(_Transfer(url, incoming, seconds, stop, authorization).receive, incoming, TRIES, stop)


class _Transfer:
    """A file that takes one connection or more."""

    def __init__(
        self, url: str, incoming: Incoming, seconds: float, stop: threading.Event, authorization: str | None
    ) -> None:
        self._incoming, self._seconds, self._stop = incoming, seconds, stop
        self._url, in_url = _split_credentials(url)
        self._authorization = in_url if authorization is None else authorization
        self._version: str | None = None  # of the file that has begun to arrive, as the server names it
        self._total: int | None = None

    def receive(self) -> None:
        """Raises Interrupted for all that another try may mend."""
        incoming = self._incoming
        with self._open() as response:
            if response.status == _PARTIAL:
                self._require_continuation(response.headers.get("Content-Range", ""))
            else:
                incoming.restart()
                self._version, self._total = _version(response.headers), _length(response)
                incoming.require_size(self._total or 0)
            for block in self._blocks(response):
                incoming.add(block)
        if self._total is not None and incoming.size != self._total:
            raise Interrupted(f"the connection ended after {incoming.size} of {self._total} bytes")

    def _open(self) -> Any:
        request = Request(self._url, headers={"User-Agent": "MegaSNN"})
        if self._authorization:
            request.add_unredirected_header("Authorization", self._authorization)
        if self._version and self._incoming.size:
            request.add_header("Range", f"bytes={self._incoming.size}-")
            request.add_header("If-Range", self._version)  # the whole file where it has changed
        try:
            return build_opener(_WithinHttp).open(request, timeout=self._seconds)
        except HTTPError as error:
            with error:
                raise self._refusal(error) from None
        except (http.client.InvalidURL, UnicodeError) as error:
            raise FetchError(f"{self._incoming.name} is no address: {error}; correct it") from None
        except (OSError, http.client.HTTPException) as error:
            reason = error.reason if isinstance(error, URLError) else error
            if isinstance(reason, ssl.SSLCertVerificationError):
                raise FetchError(f"cannot fetch {self._incoming.name}: {reason}") from None
            raise Interrupted(_in_words(reason)) from None

    def _refusal(self, error: HTTPError) -> Exception:
        problem = f"the server answers {error.code} ({error.reason})"
        if error.code == _NO_SUCH_RANGE:
            self._version = None
            return Interrupted(problem)
        if error.code >= 500 or error.code in _MAY_PASS:
            return Interrupted(problem, _seconds_to_wait(error.headers))
        kind = NotFoundError if error.code in _NOT_THERE else FetchError
        return kind(
            f"cannot fetch {self._incoming.name}: {problem}; correct the address (braces and numbers too), or see that "
            f"the file is there and may be read"
        )

    def _require_continuation(self, content_range: str) -> None:
        """Raises Interrupted for a part that is not the rest of what has arrived."""
        found = re.fullmatch(r"bytes (\d+)-\d+/(\d+|\*)", content_range.strip())
        if found and int(found[1]) == self._incoming.size:
            if self._total is None and found[2] != "*":  # the answer before came in chunks, which do not say it
                self._total = int(found[2])
            if found[2] in ("*", str(self._total)):
                return
        self._version = None  # begin anew
        raise Interrupted(f"the server sends {content_range[:100]!r} where bytes {self._incoming.size}- were asked for")

    def _blocks(self, response: Any) -> Iterator[bytes]:
        pace = Pace(self._seconds)
        while not self._stop.is_set():
            try:
                block = response.read1(BLOCK)
            except (OSError, http.client.HTTPException) as error:
                raise Interrupted(_in_words(error)) from None
            if not block:
                return
            yield block
            pace.require(len(block))
        raise FetchError(f"fetching {self._incoming.name} was stopped")


class _WithinHttp(HTTPRedirectHandler):
    """urllib itself follows a server to ftp too."""

    def redirect_request(
        self, req: Request, fp: IO[bytes], code: int, msg: str, headers: http.client.HTTPMessage, newurl: str
    ) -> Request | None:
        if not is_http(newurl):
            raise FetchError(f"{shown(req.full_url)} leads to {shown(newurl)}, which is not http; correct the address")
        return super().redirect_request(req, fp, code, msg, headers, newurl)


def _split_credentials(url: str) -> tuple[str, str]:
    """A URL without user and password, and the header that stands for them; empty where there are none."""
    parts = urlsplit(url)
    names, found, host = parts.netloc.rpartition("@")
    if not found:
        return url, ""
    header = "Basic " + base64.b64encode(unquote(names).encode()).decode()
    return urlunsplit(parts._replace(netloc=host)), header


def _version(headers: Message) -> str | None:
    """By what the server recognises the file; None where it cannot say that for sure."""
    tag = headers.get("ETag")
    if tag and not tag.startswith("W/"):
        return tag
    return headers.get("Last-Modified")


def _length(response: http.client.HTTPResponse) -> int | None:
    return response.length  # None where it is sent in chunks, or until the connection ends


def _seconds_to_wait(headers: Message) -> float:
    text = headers.get("Retry-After", "")
    return float(text) if text.isdecimal() else 0.0


def _in_words(error: object) -> str:
    return f"{type(error).__name__}: {error}" if isinstance(error, Exception) and str(error) else repr(error)
