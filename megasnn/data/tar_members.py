"""The files in a tar, found by its headers alone, whoever made it.

tarfile believes what a header says: it reads a name of a gigabyte, goes back where a size is negative, and repeats what
lies between for ever. Here each header is bounded, each step goes on, and what a member declares lies in the file.
Nothing is unpacked: names are only names.
"""

from __future__ import annotations

import os
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, NamedTuple

_HEADER_BYTES = 1 << 20  # of one member, its long name and attributes included
_NAME_LENGTH = 512
_GLOBAL_ATTRIBUTES = 100  # tarfile copies them for each member


class Member(NamedTuple):
    """A file in a tar: its name, and where its content lies, in bytes. `plain` is False for links, devices, holes."""

    name: str
    offset: int
    size: int
    plain: bool


def tar_members(file: BinaryIO, source: Path | str) -> Iterator[Member]:
    """All members but folders, in their order.

    Args:
        file: a tar that is not compressed.
        source: its name, for messages.

    Raises:
        ValueError: it is cut, damaged or no tar, or goes on after its end; the message names it, and the member.
    """
    length = os.fstat(file.fileno()).st_size
    headers = _Headers(file)
    archive = _next(lambda: tarfile.open(fileobj=headers, mode="r:"), source, 0)  # type: ignore[call-overload]
    place = 0
    while (member := _next(archive.next, source, place)) is not None:
        name, place = member.name, member.offset
        where = f"member {name[:_NAME_LENGTH]!r} of shard {source}"
        if len(name) > _NAME_LENGTH or not name.isprintable():
            raise ValueError(f"{where}: names have up to {_NAME_LENGTH} characters that can be printed; rename it")
        if member.size < 0 or archive.offset <= place or len(archive.pax_headers) > _GLOBAL_ATTRIBUTES:
            raise ValueError(
                f"{where} has a header that makes no sense (byte {place}); copy or download the shard again"
            )
        if member.offset_data + member.size > length:
            raise ValueError(
                f"shard {source} is cut: its member {name!r} should have {member.size} bytes from byte "
                f"{member.offset_data} on, the shard ends at byte {length}; copy or download it again"
            )
        archive.members = []  # it would keep them all
        headers.used = 0
        if not member.isdir():
            yield Member(name, member.offset_data, member.size, member.isreg() and not member.issparse())
    _check_end(file, archive.offset, source)


class _Headers:
    """What tarfile needs of a file, with a limit on what it reads for one member."""

    def __init__(self, file: BinaryIO) -> None:
        self._file, self.used = file, 0
        self.seek, self.tell = file.seek, file.tell

    def read(self, size: int) -> bytes:
        self.used += size
        if size < 0 or self.used > _HEADER_BYTES:
            raise tarfile.ReadError(f"a header of {size if size < 0 else self.used} bytes")
        return self._file.read(size)


def _next(step, source: Path | str, place: int):  # its type is that of `step`
    try:
        return step()
    except Exception as error:  # tarfile has no common class for what damaged headers make it raise
        raise ValueError(
            f"shard {source} is cut or is not a tar file ({error or type(error).__name__}, after byte {place}); "
            f"copy or download it again"
        ) from error


def _check_end(file: BinaryIO, offset: int, source: Path | str) -> None:
    """Look for the zeros that end a tar: one cut between two members looks whole to tarfile."""
    file.seek(offset)
    if file.read(tarfile.BLOCKSIZE) != bytes(tarfile.BLOCKSIZE):
        raise ValueError(
            f"shard {source} is cut or damaged at byte {offset}: the end-of-archive mark is missing; "
            f"copy or download it again"
        )
    while block := file.read(1 << 20):
        if any(block):
            raise ValueError(
                f"shard {source} goes on after its end mark at byte {offset} (archives joined with cat?); "
                f"those samples would be lost: pack it as one archive"
            )
