"""The safetensors files of a checkpoint: written tensor by tensor, checked as a whole, read by boxes."""

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
from typing import NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from megasnn.checkpoint.format import DTYPES, Box, Metadata, SavedFile, SavedTensor, size_problem
from megasnn.common.files import CheckpointError, DamagedError, require_regular
from megasnn.parallel.sharding import Shard, ShardedTensor

_BLOCK = 4 << 20
_HASHING_THREADS = 4
_ALONE = 1 << 20  # bytes from which a checksum is worth a thread beside the write

FileContent = list[tuple[str, SavedTensor, Tensor]]
"""Content of a file: for each box of a tensor the tensor's name, its description with this box alone, and values."""


def dtype_name(value: Tensor) -> str:
    return str(value.dtype).removeprefix("torch.")


def boxes_of(entries: Iterable[ShardedTensor], file: str) -> FileContent:
    """Boxes of a rank's tensors for its file, the largest type first: so all values in it are aligned.

    The name of a box that is a complete tensor is the tensor's own, so that other programs find it by it.
    """
    found: FileContent = []
    for entry in entries:
        if (dtype := dtype_name(entry.tensor)) not in DTYPES:
            raise CheckpointError(f"{entry.name}: {entry.tensor.dtype} cannot be saved; known: {', '.join(DTYPES)}")
        shape = entry.shard.global_shape
        for piece in entry.shard.pieces():
            offsets, sizes = piece.global_offset, piece.sizes
            name = entry.name if sizes == shape else f"{entry.name}@{','.join(map(str, offsets))}"
            saved = SavedTensor(shape, dtype, (Box(file, name, offsets, sizes),))
            found.append((entry.name, saved, piece.of_local(entry.tensor.detach())))
    return sorted(found, key=lambda each: -DTYPES[each[1].dtype][1])


def write_safetensors(path: Path, content: FileContent) -> SavedFile:
    """Writes a file one tensor after the other, safely on disk: `save_file` wants copies of all of them in memory.

    The format is the length of the header (8 bytes, little endian), the header of JSON, and the values in its order.
    """
    header, end = {}, 0
    for _, saved, _ in content:
        (box,) = saved.boxes
        offsets = [end, end := end + prod(box.sizes) * DTYPES[saved.dtype][1]]
        header[box.name] = {"dtype": DTYPES[saved.dtype][0], "shape": box.sizes, "data_offsets": offsets}
    text = json.dumps({"__metadata__": {"format": "pt"}, **header}).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb", buffering=0) as stream, ThreadPoolExecutor(1) as thread:
        crc32 = _write(stream.fileno(), memoryview(len(text).to_bytes(8, "little") + text), 0, thread)
        for _, _, value in content:
            flat = value.cpu().contiguous().view(-1)
            if flat.numel():
                crc32 = _write(stream.fileno(), flat.view(torch.uint8).numpy().data, crc32, thread)
        os.fsync(stream.fileno())
        return SavedFile(path.stat().st_size, f"{crc32:08x}")


def _write(handle: int, memory: memoryview, crc32: int, thread: Executor) -> int:
    """Appends to a file. Returns its CRC-32, of which the part before is given."""
    checked = thread.submit(zlib.crc32, memory, crc32) if len(memory) >= _ALONE else None
    begin, rest = os.lseek(handle, 0, os.SEEK_CUR), memory
    while rest:
        rest = rest[os.write(handle, rest) :]
    if checked is None:
        return zlib.crc32(memory, crc32)
    if sys.platform == "linux":  # starts the disk on them now: a save of 0.4 GB takes a quarter less
        os.posix_fadvise(handle, begin, len(memory), os.POSIX_FADV_DONTNEED)
    return checked.result()


def file_checksum(path: Path) -> str:
    """CRC-32 of a file, 8 hexadecimal digits. Raises OSError."""
    require_regular(path)
    crc32, memory = 0, memoryview(bytearray(_BLOCK))
    with open(path, "rb", buffering=0) as stream:
        while count := stream.readinto(memory):
            crc32 = zlib.crc32(memory[:count], crc32)
    return f"{crc32:08x}"


def damage(path: Path, metadata: Metadata, part: int = 0, parts: int = 1) -> list[str]:
    """Reads every byte of one checkpoint's files (`.../iter_0000100`), and returns what is wrong with them.

    Args:
        part: of so many parts the one whose files are read: ranks share them out.
    """
    files = metadata.files

    def problem(name: str) -> str | None:
        if (wrong := size_problem(path / name, files[name])) is not None:
            return wrong
        try:
            is_intact = file_checksum(path / name) == files[name].crc32
            return None if is_intact else f"{path / name} was altered: its checksum differs"
        except OSError as error:
            return f"cannot read {path / name}: {error.strerror}"

    with ThreadPoolExecutor(min(_HASHING_THREADS, os.cpu_count() or 1)) as threads:
        return [found for found in threads.map(problem, list(files)[part::parts]) if found]


def require_intact(path: Path, metadata: Metadata, part: int = 0, parts: int = 1) -> None:
    """Raises DamagedError, which names the damaged files; see `damage`."""
    if problems := damage(path, metadata, part, parts):
        raise DamagedError(*problems)


def read_full(path: Path, metadata: Metadata, names: Iterable[str]) -> dict[str, Tensor]:
    """Reads tensors of one checkpoint in full, on the CPU. Raises DamagedError for any file that is damaged."""
    require_intact(path, metadata)
    saved = metadata.tensors
    tensors = {name: torch.empty(saved[name].shape, dtype=getattr(torch, saved[name].dtype)) for name in names}
    full = [ShardedTensor(name, value, Shard(tuple(value.shape)), False) for name, value in tensors.items()]
    read_boxes(path, saved, full)
    return tensors


def read_boxes(path: Path, saved: Mapping[str, SavedTensor], entries: Iterable[ShardedTensor]) -> None:
    """Copies this rank's parts of saved tensors into its memory; boxes that only other ranks need are not read.

    Raises DamagedError where a file cannot be read, or does not hold what the description says.
    """
    wanted = defaultdict[str, list[_Overlap]](list)
    needed: Counter[str] = Counter()
    # Boxes with copies come last: the copy is read that lies in the file from which most is read anyway.
    for overlaps in sorted(_overlaps(saved, entries), key=len):
        file = max(overlaps, key=lambda file: needed[file])
        wanted[file].append(overlaps[file])
        needed[file] += overlaps[file].target.numel()
    with _utf8_name(path) as openable:
        for file, parts in sorted(wanted.items()):
            try:
                with safe_open(openable / file, framework="pt") as content:
                    for box, dtype, slices, target in parts:
                        part = content.get_slice(box.name)
                        if (part.get_dtype(), tuple(part.get_shape())) != (dtype, box.sizes):
                            raise ValueError(
                                f"{box.name} should be {dtype} {list(box.sizes)}, and is {part.get_dtype()} "
                                f"{part.get_shape()} in the file"
                            )
                        target.copy_(part[slices])
            except (OSError, SafetensorError, ValueError, RuntimeError) as error:
                raise DamagedError(f"cannot read {path / file}: {error}") from None


@contextmanager
def _utf8_name(folder: Path) -> Iterator[Path]:
    """A name of the folder that the safetensors library takes: it knows only UTF-8."""
    if os.fsencode(folder) == str(folder).encode(errors="replace"):
        yield folder
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        yield Path(f"/proc/self/fd/{handle}")
    finally:
        os.close(handle)


class _Overlap(NamedTuple):
    """Part of a saved box, whose type has this name in safetensors, and the memory that the part goes to."""

    box: Box
    dtype: str
    slices: tuple[slice, ...]
    target: Tensor


def _overlaps(saved: Mapping[str, SavedTensor], entries: Iterable[ShardedTensor]) -> Iterator[dict[str, _Overlap]]:
    """Everything that entries have in common with saved boxes: for each such part, by file, its overlap."""
    for entry in entries:
        dtype = DTYPES[saved[entry.name].dtype][0]
        for piece in entry.shard.pieces():
            found = defaultdict[tuple[tuple[int, ...], tuple[int, ...]], dict[str, _Overlap]](dict)
            for box in saved[entry.name].boxes:
                own = zip(box.offsets, box.sizes, piece.global_offset, piece.sizes, strict=True)
                spans = [(max(a, b), min(a + length, b + size)) for a, length, b, size in own]
                if any(first >= last for first, last in spans):
                    continue
                target = piece.of_local(entry.tensor.detach())
                for dim, (first, last) in enumerate(spans):
                    target = target.narrow(dim, first - piece.global_offset[dim], last - first)
                slices = (slice(a - start, b - start) for (a, b), start in zip(spans, box.offsets, strict=True))
                found[box.offsets, box.sizes][box.file] = _Overlap(box, dtype, tuple(slices), target)
            yield from found.values()
