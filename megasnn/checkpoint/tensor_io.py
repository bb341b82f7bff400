from __future__ import annotations

import json
import os
import sys
import zlib
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import contextmanager
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from megasnn.checkpoint.format import DTYPES, Box, Metadata, SavedFile, SavedTensor, size_problem
from megasnn.common.files import CheckpointError, DamagedError, require_regular
from megasnn.parallel.sharding import Piece, Shard, ShardedTensor

_READ_BYTES = 4 << 20
_HASHING_THREADS = 4  # zlib lets go of the interpreter's lock
_THREADED_BYTES = 1 << 20
"""From this size on, a second thread computes the checksum beside the write."""
FileContent = list[tuple[str, SavedTensor, Tensor]]
"""Boxes of a file: the tensor's name, its description with this box alone, and values."""


def dtype_name(value: Tensor) -> str:
    return str(value.dtype).removeprefix("torch.")


def whole_tensors(values: Mapping[str, Tensor]) -> list[ShardedTensor]:
    """Global tensors as the shards of a single rank."""
    return [ShardedTensor(name, value, Shard(tuple(value.shape)), False) for name, value in values.items()]


def allocated(saved: SavedTensor, device: str = "cpu") -> Tensor:
    """A global tensor without values."""
    return torch.empty(saved.shape, dtype=getattr(torch, saved.dtype), device=device)


def boxes_of(entries: Iterable[ShardedTensor], file: str) -> FileContent:
    """A rank's boxes for its file, the largest type first."""
    found: FileContent = []
    for entry in entries:
        dtype = dtype_name(entry.tensor)
        if dtype not in DTYPES:
            raise CheckpointError(f"{entry.name}: {entry.tensor.dtype} cannot be saved; known: {', '.join(DTYPES)}")
        shape = entry.shard.global_shape
        for piece in entry.shard.pieces():
            # Other programs find a complete tensor by its own name.
            name = entry.name
            if piece.sizes != shape:
                name = f"{entry.name}@{','.join(map(str, piece.global_offset))}"
            saved = SavedTensor(shape, dtype, (Box(file, name, piece.global_offset, piece.sizes),))
            found.append((entry.name, saved, piece.of_local(entry.tensor.detach())))
    # Largest type first, so that all values are aligned.
    return sorted(found, key=lambda each: -DTYPES[each[1].dtype][1])


def write_safetensors(path: Path, content: FileContent) -> SavedFile:
    """Header length (8 bytes, little endian), JSON header, then values in its order. Synced."""
    header = {}
    end = 0
    for _, saved, _ in content:
        (box,) = saved.boxes
        begin = end
        kind, item_bytes = DTYPES[saved.dtype]
        end += prod(box.sizes) * item_bytes
        header[box.name] = {"dtype": kind, "shape": box.sizes, "data_offsets": [begin, end]}
    text = json.dumps({"__metadata__": {"format": "pt"}, **header}).encode()
    # The header's length takes 8 bytes: values begin at a multiple of 8.
    text += b" " * (-len(text) % 8)
    with open(path, "wb", buffering=0) as stream, ThreadPoolExecutor(1) as thread:
        crc32 = _write(stream.fileno(), memoryview(len(text).to_bytes(8, "little") + text), 0, thread)
        # Tensor by tensor: safetensors' own `save_file` would need contiguous copies of all in the host's memory.
        for _, _, value in content:
            flat = value.cpu().contiguous().view(-1)
            if flat.numel():
                crc32 = _write(stream.fileno(), flat.view(torch.uint8).numpy().data, crc32, thread)
        os.fsync(stream.fileno())
        return SavedFile(path.stat().st_size, f"{crc32:08x}")


def _write(handle: int, memory: memoryview, crc32: int, thread: Executor) -> int:
    """Returns the file's CRC-32 after this memory."""
    checksum = thread.submit(zlib.crc32, memory, crc32) if len(memory) >= _THREADED_BYTES else None
    begin = os.lseek(handle, 0, os.SEEK_CUR)
    rest = memory
    # Linux writes 2 GiB at once at most.
    while rest:
        rest = rest[os.write(handle, rest) :]
    if checksum is None:
        return zlib.crc32(memory, crc32)
    if sys.platform == "linux":
        # The disk starts on these pages now, beside the next tensor: a save of 0.4 GB takes a quarter less.
        os.posix_fadvise(handle, begin, len(memory), os.POSIX_FADV_DONTNEED)
    return checksum.result()


def file_checksum(path: Path) -> str:
    """CRC-32, 8 hexadecimal digits. Raises OSError."""
    require_regular(path)
    crc32 = 0
    memory = memoryview(bytearray(_READ_BYTES))
    with open(path, "rb", buffering=0) as stream:
        while count := stream.readinto(memory):
            crc32 = zlib.crc32(memory[:count], crc32)
    return f"{crc32:08x}"


def damaged_files(path: Path, metadata: Metadata, part: int = 0, parts: int = 1) -> list[str]:
    """Problems in one checkpoint's files (`.../iter_0000100`), after reading every byte.

    Args:
        part, parts: ranks divide the files.
    """
    files = metadata.files

    def problem(name: str) -> str | None:
        wrong_size = size_problem(path / name, files[name])
        if wrong_size is not None:
            return wrong_size
        try:
            is_intact = file_checksum(path / name) == files[name].crc32
        except OSError as error:
            return f"cannot read {path / name}: {error.strerror}"
        return None if is_intact else f"{path / name} was altered: its checksum differs"

    # Every n-th file: ranks' files are about equally large, so each rank reads as much as the others.
    with ThreadPoolExecutor(min(_HASHING_THREADS, os.cpu_count() or 1)) as threads:
        found = list(threads.map(problem, list(files)[part::parts]))
    return [each for each in found if each]


def require_intact(path: Path, metadata: Metadata) -> None:
    """Raises DamagedError with all damaged files; see `damaged_files`."""
    if problems := damaged_files(path, metadata):
        raise DamagedError(*problems)


def read_full(path: Path, metadata: Metadata, names: Iterable[str]) -> dict[str, Tensor]:
    """Reads whole tensors, on the CPU. Raises DamagedError if any file is damaged."""
    require_intact(path, metadata)
    tensors = {name: allocated(metadata.tensors[name]) for name in names}
    read_boxes(path, metadata.tensors, whole_tensors(tensors))
    return tensors


def read_boxes(path: Path, saved: Mapping[str, SavedTensor], entries: Iterable[ShardedTensor]) -> None:
    """Copies this rank's parts into its memory. Other boxes are not read.

    Raises:
        DamagedError: a file cannot be read, or differs from its description.
    """
    wanted = defaultdict[str, list[_Overlap]](list)
    elements: Counter[str] = Counter()
    # Boxes with copies come last. A copied box is read from the file with most elements to read: few files are opened.
    for overlaps in sorted(_overlaps(saved, entries), key=len):
        file = max(overlaps, key=lambda file: elements[file])
        wanted[file].append(overlaps[file])
        elements[file] += overlaps[file].target.numel()
    with _utf8_name(path) as openable:
        for file, parts in sorted(wanted.items()):
            try:
                with safe_open(openable / file, framework="pt") as content:
                    for part in parts:
                        part.read(content)
            except (OSError, SafetensorError, ValueError, RuntimeError) as error:
                raise DamagedError(f"cannot read {path / file}: {error}") from None


@contextmanager
def _utf8_name(folder: Path) -> Iterator[Path]:
    # safetensors opens no file whose name is not UTF-8.
    if os.fsencode(folder) == str(folder).encode(errors="replace"):
        yield folder
        return
    # /proc gives the open folder a name in ASCII.
    handle = os.open(folder, os.O_RDONLY)
    try:
        yield Path(f"/proc/self/fd/{handle}")
    finally:
        os.close(handle)


class _Overlap(NamedTuple):
    """Common part of a saved box and this rank's memory. `dtype` is safetensors' name; `slices` are in the box."""

    box: Box
    dtype: str
    slices: tuple[slice, ...]
    target: Tensor

    def read(self, content: Any) -> None:
        """Raises ValueError if the box differs from its description."""
        stored = content.get_slice(self.box.name)
        if (stored.get_dtype(), tuple(stored.get_shape())) != (self.dtype, self.box.sizes):
            raise ValueError(
                f"{self.box.name} should be {self.dtype} {list(self.box.sizes)}, and is {stored.get_dtype()} "
                f"{stored.get_shape()} in the file"
            )
        self.target.copy_(stored[self.slices])


def _overlaps(saved: Mapping[str, SavedTensor], entries: Iterable[ShardedTensor]) -> Iterator[dict[str, _Overlap]]:
    """Each box that a rank's piece needs, by file: equal boxes in several files are copies."""
    for entry in entries:
        dtype = DTYPES[saved[entry.name].dtype][0]
        for piece in entry.shard.pieces():
            copies = defaultdict[tuple[tuple[int, ...], tuple[int, ...]], dict[str, _Overlap]](dict)
            for box in saved[entry.name].boxes:
                spans = _common_spans(box, piece)
                if any(first >= last for first, last in spans):
                    continue
                target = piece.of_local(entry.tensor.detach())
                slices = []
                for dim, (first, last) in enumerate(spans):
                    target = target.narrow(dim, first - piece.global_offset[dim], last - first)
                    slices.append(slice(first - box.offsets[dim], last - box.offsets[dim]))
                copies[box.offsets, box.sizes][box.file] = _Overlap(box, dtype, tuple(slices), target)
            yield from copies.values()


def _common_spans(box: Box, piece: Piece) -> list[tuple[int, int]]:
    """First and last index (exclusive) by dimension, global."""
    spans = []
    for dim, (offset, size) in enumerate(zip(box.offsets, box.sizes, strict=True)):
        begin = piece.global_offset[dim]
        spans.append((max(offset, begin), min(offset + size, begin + piece.sizes[dim])))
    return spans
