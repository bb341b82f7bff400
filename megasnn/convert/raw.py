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
    memory = memoryview(values.view(torch.uint8).numpy()) if count else memoryview(b"")
    with path.open("rb", buffering=0) as stream:
        stream.seek(offset)
        done = 0
        while done < len(memory):
            step = stream.readinto(memory[done:])
            if not step:
                raise CheckpointError(f"{path} is cut: it ends at byte {offset + done}, {len(memory) - done} are missing")
            done += step
    return values


def write_elements(stream: BinaryIO, offset: int, values: Tensor) -> None:
    """Writes all elements, in C order, from the byte `offset` of an unbuffered file on."""
    stream.seek(offset)
    memory = memoryview(values.contiguous().reshape(-1).view(torch.uint8).numpy()) if values.numel() else b""
    while memory:
        memory = memory[stream.write(memory) :]
