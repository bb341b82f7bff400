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


def is_command(text: str) -> bool:
    """Whether this is a command whose output is a shard."""
    return text.startswith(PIPE)


def is_url(text: str) -> bool:
    """Whether this is fetched; a path otherwise."""
    return is_command(text) or _SCHEME.match(text) is not None


def require_address(url: str) -> None:
    """Raises ValueError for a URL that names no place: a broken host or port, or http(s) without a host."""
    if is_command(url):
        return
    try:
        parts = urlsplit(url)
        host, _ = parts.hostname, parts.port
    except ValueError as error:
        raise ValueError(f"{printable(url.rpartition('@')[2])} is no address: {error}; correct it") from None
    if is_http(url) and not host:
        raise ValueError(f"{shown(url)} is no address: it names no host; correct it")


def scheme_of(url: str) -> str:
    return PIPE[:-1] if is_command(url) else urlsplit(url).scheme.lower()


def is_http(url: str) -> bool:
    return scheme_of(url) in _HTTP


def shown(url: str) -> str:
    """A URL as messages name it: without what would steer a terminal, and without the passwords and keys in it."""
    if is_command(url):
        return printable(url)
    parts = urlsplit(url)
    host, query = parts.netloc.rpartition("@")[2], parts.query and "..."
    return printable(urlunsplit(parts._replace(netloc=host, query=query)))


def file_name(url: str) -> str:
    """The last part of a URL's path; "pipe" of a command."""
    if is_command(url):
        return PIPE[:-1]
    return PurePosixPath(unquote(urlsplit(url).path)).name


def beside(url: str, name: str) -> str | None:
    """The URL of another file in the same folder; None for a command, of which nobody knows the folder."""
    if is_command(url):
        return None
    parts = urlsplit(url)
    return urlunsplit((parts.scheme, parts.netloc, f"{parts.path.rpartition('/')[0]}/{name}", "", ""))
