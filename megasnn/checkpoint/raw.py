"""A tensor's bytes in a file, straight to and from its memory."""

from __future__ import annotations

import os
import struct
import zipfile
from pathlib import Path
from typing import BinaryIO

import torch
from torch import Tensor

from megasnn.files.described import open_regular
from megasnn.files.problems import CheckpointError


def read_elements(path: Path, offset: int, count: int, dtype: torch.dtype) -> Tensor:
    """`count` elements from the byte `offset` of a file on. Raises CheckpointError when the file ends before."""
    with open_regular(path) as stream:
        missing = offset + count * dtype.itemsize - os.fstat(stream.fileno()).st_size
        if missing > 0:
            raise CheckpointError(f"{path} is cut: its last {missing} bytes are missing")
        values = torch.empty(count, dtype=dtype)
        memory = _memory(values)
        stream.seek(offset)
        while memory:
            done = stream.readinto(memory)
            if not done:
                raise CheckpointError(f"{path} is cut: its last {len(memory)} bytes are missing")
            memory = memory[done:]
    return values


def write_elements(stream: BinaryIO, offset: int, values: Tensor) -> None:
    """Writes all elements, in C order, from the byte `offset` of an unbuffered file on."""
    stream.seek(offset)
    memory = bytes_of(values)
    while memory:
        memory = memory[stream.write(memory) :]


def bytes_of(values: Tensor) -> memoryview:
    """All elements, in C order."""
    return _memory(values.contiguous().reshape(-1))


def member_begin(stream: BinaryIO, entry: zipfile.ZipInfo) -> int:
    """Where in a zip archive the bytes of a stored member begin. Raises struct.error when the file ends before."""
    # A local header (APPNOTE.TXT, 4.3.7): 30 bytes, then the name and extra fields, whose lengths are told.
    stream.seek(entry.header_offset + 26)
    return entry.header_offset + 30 + sum(struct.unpack("<2H", stream.read(4)))


def _memory(flat: Tensor) -> memoryview:
    return flat.view(torch.uint8).numpy().data if flat.numel() else memoryview(b"")
