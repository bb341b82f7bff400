"""Megatron's indexed data set: tokens in PREFIX.bin, lengths and documents in PREFIX.idx.

The index is little-endian and not aligned: `MMIDIDX\\0\\0`, version 1 (u64), token type (u8), sequence count N (u64),
bound count D (u64), lengths in tokens (i32 `[N]`), offsets in bytes (i64 `[N]`), document bounds in sequences
(i64 `[D]`). Source: NVIDIA/Megatron-LM, megatron/core/datasets/indexed_dataset.py.
"""

from __future__ import annotations

import hashlib
import os
import struct
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megasnn.common.files import require_regular, sync
from megasnn.data.shards import FileState, file_state, read_part

INDEX = ".idx"
DATA = ".bin"
_MAGIC = b"MMIDIDX\x00\x00"
_VERSION = 1
_HEADER = struct.Struct("<9sQBQQ")
_SEQUENCE_BYTES = 4 + 8
_BOUND_BYTES = 8
_TYPES = {1: "<u1", 2: "<i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}
"""Token types by code; 6 and 7 are floating-point numbers, whose order differs between versions."""
_SMALL_VOCABULARY = 65500
"""Megatron-Core and datatrove write u16 for smaller vocabularies, otherwise i32."""
_LONGEST = (1 << 31) - 1
_SCANNED = 1 << 22
"""Tokens read at once by a scan."""


@dataclass(frozen=True)
class TokenIndex:
    """An index file's content.

    Attributes:
        dtype: token type.
        lengths: each sequence's tokens, int32 `[N]`. A document is one sequence or more.
        offsets: each sequence's first byte, int64 `[N]`.
        documents: each document's first sequence, and N at the end, int64 `[D]`. An empty document repeats a number.
    """

    dtype: np.dtype[Any]
    lengths: NDArray[np.int32]
    offsets: NDArray[np.int64]
    documents: NDArray[np.int64]


def read_token_index(path: Path) -> TokenIndex:
    """Reads an .idx file. Raises OSError, and ValueError if it is damaged or has another format."""
    require_regular(path)
    size = path.stat().st_size
    with open(path, "rb") as file:
        header = file.read(_HEADER.size)
    if len(header) < _HEADER.size or not header.startswith(_MAGIC):
        raise ValueError(f"{path} is no index of tokens: its first bytes are not those of a Megatron .idx file")
    _, version, code, sequences, bounds = _HEADER.unpack(header)
    if version != _VERSION:
        raise ValueError(f"{path} has version {version}, and version {_VERSION} is read; write it anew")
    if code not in _TYPES:
        raise ValueError(f"{path} says type {code}, and tokens are whole numbers: types {', '.join(map(str, _TYPES))}")
    expected = _HEADER.size + sequences * _SEQUENCE_BYTES + bounds * _BOUND_BYTES
    if size == expected + sequences and sequences:
        raise ValueError(f"{path} has a mode for each sequence, as multimodal data sets do; prepare the text alone")
    if size != expected:
        raise ValueError(
            f"{path} is cut or damaged: {sequences} sequences and {bounds} document bounds take {expected:,} bytes, "
            f"and it has {size:,}"
        )
    # The arrays are not aligned. Copies are, and outlive the file.
    content = np.memmap(path, np.uint8, "r")
    start = _HEADER.size
    found = []
    for dtype, count in (("<i4", sequences), ("<i8", sequences), ("<i8", bounds)):
        found.append(np.frombuffer(content, dtype, count, start).copy())
        start += found[-1].nbytes
    index = TokenIndex(np.dtype(_TYPES[code]), *found)
    _require_sound(path, index)
    return index


def _require_sound(path: Path, index: TokenIndex) -> None:
    """Raises ValueError for negative numbers, or document bounds that do not rise from 0 to N."""
    for name, values in (("length", index.lengths), ("offset", index.offsets)):
        if values.size and values.min() < 0:
            raise ValueError(f"{path} is damaged: sequence {int(values.argmin())} has the {name} {values.min()}")
    # An index merged by an old Megatron may hold wrong bounds (NVIDIA/Megatron-LM, issue 81).
    bounds = index.documents
    count = len(index.lengths)
    if not bounds.size or bounds[0] != 0 or bounds[-1] != count or (np.diff(bounds) < 0).any():
        raise ValueError(
            f"{path} is damaged: its document bounds must rise from 0 to {count}, its number of sequences; write it "
            "anew"
        )


class IndexedTokens:
    """An indexed data set as one sequence, over document borders; can be pickled.

    Attributes:
        prefix: path without .bin and .idx.
        documents: document count.
        identity: token and document counts, and a hash over all lengths.
    Raises:
        ValueError: a file is damaged, or the index does not fit the data.
        OSError: a file is missing.
    """

    def __init__(self, prefix: Path) -> None:
        self.prefix = prefix
        self._data = with_ending(prefix, DATA)
        require_regular(self._data)
        self._state: FileState = file_state(os.stat(self._data))
        index_file = with_ending(prefix, INDEX)
        index = read_token_index(index_file)
        self._dtype = index.dtype
        ends = index.offsets + index.lengths * np.int64(index.dtype.itemsize)
        size = self._state[0]
        # Offsets of an old merge overflow (NVIDIA/Megatron-LM, issue 1672).
        if ends.max(initial=0) != size or index.offsets.max(initial=0) > size:
            raise ValueError(
                f"{index_file} does not fit {self._data}: its last sequence ends at byte {int(ends.max(initial=0)):,}, "
                f"and the file has {size:,} bytes; write both anew"
            )
        # Sequences next to each other in the file are one run. Nearly every file is a single run: no list of documents
        # is searched or kept.
        begins_run = np.ones(len(ends), bool)
        begins_run[1:] = index.offsets[1:] != ends[:-1]
        first = np.concatenate([[0], np.cumsum(index.lengths, dtype=np.int64)])
        self._runs = first[:-1][begins_run]
        self._offsets = index.offsets[begins_run]
        self._tokens = int(first[-1])
        self.documents = len(index.documents) - 1
        lengths = hashlib.blake2b(index.lengths.tobytes(), digest_size=8)
        lengths.update(index.documents.tobytes())
        self.identity = f"{self._tokens} tokens in {self.documents} documents {lengths.hexdigest()}"

    def __len__(self) -> int:
        return self._tokens

    def read(self, start: int, count: int) -> NDArray[np.int64]:
        """`count` tokens from position `start` on, int64. Raises OSError if the file has changed."""
        parts = []
        run = int(np.searchsorted(self._runs, start, side="right")) - 1
        while count > 0:
            end = self._runs[run + 1] if run + 1 < len(self._runs) else self._tokens
            size = min(count, int(end) - start)
            offset = int(self._offsets[run]) + (start - int(self._runs[run])) * self._dtype.itemsize
            # Read, not mapped: a file that is cut while it is mapped ends the process.
            content = read_part(self._data, self._state, size * self._dtype.itemsize, offset)
            parts.append(np.frombuffer(content, self._dtype))
            start += size
            count -= size
            run += 1
        return np.concatenate(parts).astype(np.int64)

    def range(self) -> tuple[int, int]:
        """Smallest and largest token; (0, -1) without tokens. Reads the whole file."""
        lowest = 0
        highest = -1
        for start in range(0, len(self), _SCANNED):
            tokens = self.read(start, min(_SCANNED, len(self) - start))
            lowest = min(lowest, int(tokens.min()))
            highest = max(highest, int(tokens.max()))
        return lowest, highest


class IndexedWriter:
    """Writes documents as an indexed data set; the index comes last, after a block without an error.

    Args:
        vocab_size: decides the token type, u16 or i32.
    """

    def __init__(self, prefix: Path, vocab_size: int) -> None:
        self._index = with_ending(prefix, INDEX)
        self._dtype = np.dtype("<u2" if vocab_size < _SMALL_VOCABULARY else "<i4")
        self._lengths: list[int] = []
        self._documents = [0]
        self._data = open(with_ending(prefix, DATA), "wb")

    def add(self, tokens: NDArray[Any]) -> None:
        """Adds a document as one sequence, an empty one without any. Raises ValueError from 2^31 tokens on."""
        if len(tokens) > _LONGEST:
            raise ValueError(f"a document of {len(tokens):,} tokens is longer than an index can say; divide it")
        self._data.write(tokens.astype(self._dtype).tobytes())
        if len(tokens):
            self._lengths.append(len(tokens))
        self._documents.append(len(self._lengths))

    def __enter__(self) -> IndexedWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._data.close()
        # Without an index nobody reads what an interrupted writer left.
        if error is not None:
            return
        lengths = np.array(self._lengths, "<i4")
        sizes = lengths.astype("<i8") * self._dtype.itemsize
        offsets = np.cumsum(sizes) - sizes
        documents = np.array(self._documents, "<i8")
        code = next(code for code, name in _TYPES.items() if np.dtype(name) == self._dtype)
        header = _HEADER.pack(_MAGIC, _VERSION, code, len(lengths), len(documents))
        self._index.write_bytes(header + lengths.tobytes() + offsets.tobytes() + documents.tobytes())
        sync(Path(self._data.name))
        sync(self._index)


def with_ending(prefix: Path, ending: str) -> Path:
    """PREFIX.bin or PREFIX.idx."""
    # Not with_suffix: "corpus.v1" is a prefix with a dot.
    return prefix.with_name(prefix.name + ending)
