"""The safetensors format (github.com/huggingface/safetensors), read and written tensor by tensor.

The library of that name writes a dictionary that is in memory as a whole. The format is a header of JSON behind its
length (8 bytes, little-endian), then the tensors' bytes.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from pydantic import with_config
from torch import Tensor

from megasnn.checkpoint.raw import read_elements, write_elements
from megasnn.convert.new_file import new_file
from megasnn.convert.source import Facts, StoredBox, TensorInfo, TensorSource
from megasnn.files.described import (
    STRICT,
    Count,
    DescriptionError,
    Shape,
    TensorName,
    described,
    in_message,
    open_regular,
)
from megasnn.files.problems import CheckpointError

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
_METADATA = "__metadata__"
_LENGTH_BYTES = 8
_LARGEST_HEADER = 100_000_000  # what the library accepts


@with_config(STRICT)
@dataclass(frozen=True)
class TensorEntry:
    """What the header says of a tensor; `data_offsets` are its first byte and the one behind its last."""

    dtype: str
    shape: Shape
    data_offsets: tuple[Count, Count]


_Header: Any = dict[TensorName, TensorEntry | dict[str, str]]


class SafetensorsSource(TensorSource):
    """A safetensors file. Raises CheckpointError when it is not of this format, is cut, or holds an unknown type."""

    kind = "safetensors"

    def __init__(self, path: Path) -> None:
        self.path, self.facts = path, Facts()
        header, self._begin, size = _read_header(path)
        self.files = {path.name: size}
        header.pop(_METADATA, None)
        self._offsets: dict[str, int] = {}
        self.tensors = {name: self._describe(name, told) for name, told in header.items()}
        self._require_no_overlap(header)

    def _describe(self, name: str, told: TensorEntry | dict[str, str]) -> TensorInfo:
        if not isinstance(told, TensorEntry):
            raise CheckpointError(f"{self.path}: the header says of {name} only {in_message(told)}")
        if told.dtype not in DTYPES:
            raise CheckpointError(
                f"{self.path}: {name} is of type {in_message(told.dtype)}; known here: {', '.join(DTYPES)}"
            )
        box = StoredBox(self.path.name, (0,) * len(told.shape), told.shape)
        info = TensorInfo(told.shape, DTYPES[told.dtype], (box,))
        (start, end), size = told.data_offsets, self.files[self.path.name]
        if end - start != info.bytes or self._begin + end > size:
            raise CheckpointError(
                f"{self.path} is cut or altered: {name} should have {info.bytes} bytes and lie at {start}..{end} of "
                f"{size - self._begin}"
            )
        self._offsets[name] = self._begin + start
        return info

    def _require_no_overlap(self, header: Mapping[str, Any]) -> None:
        last = 0
        for name, told in sorted(header.items(), key=lambda item: item[1].data_offsets):
            start, end = told.data_offsets
            if start < last:
                raise CheckpointError(
                    f"{self.path}: {name} lies at {start}..{end}, which another tensor has up to {last}"
                )
            last = end

    def read(self, name: str) -> Tensor:
        info = self.tensors[name]
        return read_elements(self.path, self._offsets[name], info.elements, info.dtype).view(info.shape)


def _read_header(path: Path) -> tuple[dict[str, TensorEntry | dict[str, str]], int, int]:
    """The header, where the tensors' bytes begin, and the size of the file."""
    with open_regular(path) as stream:
        length = int.from_bytes(stream.read(_LENGTH_BYTES), "little")
        size = os.fstat(stream.fileno()).st_size
        if not 2 <= length <= min(size - _LENGTH_BYTES, _LARGEST_HEADER):
            raise CheckpointError(
                f"{path} is no safetensors file, or it is cut: it has {size} bytes and claims a header of {length}"
            )
        text = stream.read(length)
    try:
        header = described(_Header, text, path)
    except DescriptionError as error:
        raise CheckpointError(str(error)) from None
    return header, _LENGTH_BYTES + length, size


@contextmanager
def new_safetensors_file(
    path: Path, tensors: Mapping[str, TensorInfo], metadata: Mapping[str, str]
) -> Iterator[Callable[[str, Tensor], None]]:
    """A new file; the function that it gives puts each tensor into it, in any order.

    Raises:
        CheckpointError: there is such a file already, or a type that the format does not have.
    """
    header: dict[str, Any] = {_METADATA: dict(metadata)}
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
        yield lambda name, value: write_elements(stream, begin + offsets[name], value)
