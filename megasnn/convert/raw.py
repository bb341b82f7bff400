"""A tensor's bytes in a file, straight to and from its memory."""

from __future__ import annotations

from pathlib import Path
from typing import BinaryIO

import torch
from torch import Tensor

from megasnn.checkpoint.errors import CheckpointError


def read_elements(path: Path, offset: int, count: int, dtype: torch.dtype) -> Tensor:
    """`count` elements from the byte `offset` of a file on. Raises CheckpointError when the file ends before."""
    values = torch.empty(count, dtype=dtype)
    memory = _memory(values)
    with path.open("rb", buffering=0) as stream:
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


def _memory(flat: Tensor) -> memoryview:
    return flat.view(torch.uint8).numpy().data if flat.numel() else memoryview(b"")
