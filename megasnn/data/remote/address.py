"""Addresses of shards: which are URLs, and what lies beside one."""

from __future__ import annotations

import re
from pathlib import PurePosixPath
from urllib.parse import unquote, urlsplit, urlunsplit

from megasnn.files.described import printable

PIPE = "pipe:"
"""Begins a command whose output is a shard. Only a command line may give one."""
_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")
_HTTP = ("http", "https")


def is_url(text: str) -> bool:
    """Whether this is fetched; a path otherwise."""
    return text.startswith(PIPE) or _SCHEME.match(text) is not None


def scheme_of(url: str) -> str:
    return PIPE[:-1] if url.startswith(PIPE) else urlsplit(url).scheme.lower()


def is_http(url: str) -> bool:
    return scheme_of(url) in _HTTP


def shown(url: str) -> str:
    """A URL as messages name it: without what would steer a terminal, and without the passwords and keys in it."""
    if url.startswith(PIPE):
        return printable(url)
    parts = urlsplit(url)
    host, query = parts.netloc.rpartition("@")[2], parts.query and "..."
    return printable(urlunsplit(parts._replace(netloc=host, query=query)))


def file_name(url: str) -> str:
    """The last part of a URL's path; "pipe" of a command."""
    if url.startswith(PIPE):
        return PIPE[:-1]
    return PurePosixPath(unquote(urlsplit(url).path)).name


def beside(url: str, name: str) -> str | None:
    """The URL of another file in the same folder; None for a command, of which nobody knows the folder."""
    if url.startswith(PIPE):
        return None
    parts = urlsplit(url)
    return urlunsplit((parts.scheme, parts.netloc, f"{parts.path.rpartition('/')[0]}/{name}", "", ""))
