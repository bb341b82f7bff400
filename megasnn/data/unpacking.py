"""A `.tar.gz` has no random access: it is unpacked once into the cache, within a bound."""

from __future__ import annotations

import gzip
import zlib
from pathlib import Path

from megasnn.cache.room import LIMIT, cache_limit
from megasnn.files.described import open_regular

_BLOCK = 1 << 20
_MAGIC = b"\x1f\x8b"
# An image or a recording packs to a tenth; headers of small files to a thirtieth.
_MOST, _LEAST = 100, 256 << 20


def is_packed(path: Path) -> bool:
    """Whether a file begins as gzip does."""
    with open_regular(path) as file:
        return file.read(len(_MAGIC)) == _MAGIC


def unpack(packed: Path, target: Path, source: Path | str, limit: int | None) -> None:
    """Unpacks a `.tar.gz` into a file in the cache.

    Args:
        source: its name for messages.
        limit: bytes that it may unpack to; None: 100 times its own, and 256 MB at least.

    Raises:
        ValueError: it is cut, damaged, or unpacks to more; the message names it.
        OSError: it cannot be written.
    """
    size = packed.stat().st_size
    if limit is None:
        limit = max(_LEAST, _MOST * size)
    left = min(limit, cache_limit())
    try:
        with open_regular(packed) as file, gzip.GzipFile(fileobj=file) as content, open(target, "wb") as plain:
            while block := content.read(_BLOCK):
                left -= len(block)
                if left < 0:
                    raise ValueError(_too_much(source, size, limit))
                plain.write(block)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise ValueError(f"shard {source} is cut or damaged ({error}); download it again") from error


def _too_much(source: Path | str, size: int, limit: int) -> str:
    if cache_limit() < limit:
        return f"shard {source} of {size} bytes unpacks to more than the cache may hold; raise {LIMIT}"
    return (
        f"shard {source} of {size} bytes unpacks to more than {limit / 1e9:.3g} GB; if it is sound, raise "
        f"--max-unpacked-gb, or unpack it yourself"
    )
