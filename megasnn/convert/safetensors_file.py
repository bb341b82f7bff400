"""The safetensors format (github.com/huggingface/safetensors), read and written tensor by tensor.

The library of that name writes a dictionary that is in memory as a whole. The format is a header of JSON behind its
length (8 bytes, little-endian), then the tensors' bytes.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from megasnn.checkpoint.errors import CheckpointError
from megasnn.convert.new_file import new_file
from megasnn.convert.raw import read_elements, write_elements
from megasnn.convert.source import Facts, StoredBox, TensorInfo, TensorSource

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}
_LENGTH_BYTES = 8
_LARGEST_HEADER = 100_000_000  # what the library accepts


class SafetensorsSource(TensorSource):
    """Raises CheckpointError when the file is not of this format, is cut, or holds a type that is unknown here."""

    kind = "safetensors"

    def __init__(self, path: Path) -> None:
        self.path, self.facts, self.files = path, Facts(), {path.name: path.stat().st_size}
        header, self._begin = _read_header(path)
        self._offsets: dict[str, int] = {}
        tensors = {}
        for name, told in header.items():
            if name != "__metadata__":
                tensors[name] = self._describe(name, told)
        self.tensors = tensors

    def _describe(self, name: str, told: Any) -> TensorInfo:
        try:
            shape, (start, end), dtype = tuple(told["shape"]), told["data_offsets"], told["dtype"]
        except (KeyError, TypeError, ValueError):
            raise CheckpointError(f"{self.path}: the header says of {name} only {told}") from None
        if dtype not in DTYPES:
            raise CheckpointError(f"{self.path}: {name} is of type {dtype}; known here: {', '.join(DTYPES)}")
        info = TensorInfo(shape, DTYPES[dtype], (StoredBox(self.path.name, (0,) * len(shape), shape),))
        size = self.files[self.path.name]
        if end - start != info.bytes or self._begin + end > size:
            raise CheckpointError(
                f"{self.path} is cut or altered: {name} should have {info.bytes} bytes and lie at {start}..{end} of "
                f"{size - self._begin}"
            )
        self._offsets[name] = self._begin + start
        return info

    def read(self, name: str) -> Tensor:
        info = self.tensors[name]
        return read_elements(self.path, self._offsets[name], info.elements, info.dtype).view(info.shape)


def _read_header(path: Path) -> tuple[dict[str, Any], int]:
    """The header, and where the tensors' bytes begin."""
    with path.open("rb") as stream:
        length = int.from_bytes(stream.read(_LENGTH_BYTES), "little")
        text = stream.read(length) if length <= _LARGEST_HEADER else b""
    try:
        header = json.loads(text) if len(text) == length else None
    except ValueError:
        header = None
    if not isinstance(header, dict):
        raise CheckpointError(f"{path} is no safetensors file, or it is cut: there is no header of {length} bytes")
    return header, _LENGTH_BYTES + length


class SafetensorsFiller:
    def __init__(self, stream: BinaryIO, offsets: Mapping[str, int]) -> None:
        self._stream, self._offsets = stream, offsets

    def put(self, name: str, value: Tensor) -> None:
        write_elements(self._stream, self._offsets[name], value)


@contextmanager
def new_safetensors_file(
    path: Path, tensors: Mapping[str, TensorInfo], metadata: Mapping[str, str]
) -> Iterator[SafetensorsFiller]:
    """A file for these tensors, whose values are then put in any order. Raises CheckpointError for unknown types."""
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    offsets, end = {}, 0
    # The library aligns tensors by writing larger elements first.
    for name, info in sorted(tensors.items(), key=lambda pair: (-pair[1].dtype.itemsize, pair[0])):
        if info.dtype not in NAMES:
            raise CheckpointError(f"{name}: safetensors has no name for {info.dtype}")
        offsets[name], end = end, end + info.bytes
        header[name] = {"dtype": NAMES[info.dtype], "shape": list(info.shape), "data_offsets": [offsets[name], end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % _LENGTH_BYTES)
    begin = _LENGTH_BYTES + len(text)
    with new_file(path) as aside, aside.open("wb", buffering=0) as stream:
        stream.write(len(text).to_bytes(_LENGTH_BYTES, "little") + text)
        stream.truncate(begin + end)
        yield SafetensorsFiller(stream, {name: begin + offset for name, offset in offsets.items()})
