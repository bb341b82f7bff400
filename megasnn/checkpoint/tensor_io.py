"""The safetensors files of a checkpoint: written tensor by tensor, checked as a whole, read by boxes."""

from __future__ import annotations

import io
import json
import os
import sys
import threading
import zlib
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from megasnn.checkpoint.folder import reading
from megasnn.checkpoint.format import DTYPES, Box, Metadata, SavedFile, SavedTensor, size_problem
from megasnn.files.problems import CheckpointError, DamagedError
from megasnn.parallel.sharding import Piece, ShardedTensor

_BLOCK = 8 << 20
_HASHING_THREADS = 4


@dataclass(frozen=True)
class LocalBox:
    """A box that a rank writes, without its values.

    Attributes:
        tensor, shape, dtype: global name and shape, and the type by its name in torch.
        offsets, sizes: the box in the global tensor.
    """

    tensor: str
    shape: tuple[int, ...]
    dtype: str
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def name(self) -> str:
        """In a file: that of the tensor where it is whole, so that other programs read it by this name."""
        return self.tensor if self.sizes == self.shape else f"{self.tensor}@{','.join(map(str, self.offsets))}"

    def in_file(self, file: str) -> Box:
        return Box(file, self.name, self.offsets, self.sizes)


def boxes_of(entries: Iterable[ShardedTensor]) -> list[tuple[LocalBox, ShardedTensor, Piece]]:
    """The boxes of a rank's tensors, the largest type first: so all values in a file are aligned."""
    found = []
    for entry in entries:
        if (dtype := str(entry.tensor.dtype).removeprefix("torch.")) not in DTYPES:
            raise CheckpointError(f"{entry.name}: {entry.tensor.dtype} cannot be saved; known: {', '.join(DTYPES)}")
        shape = entry.shard.global_shape
        is_whole = entry.shard.local_shape == shape  # even where it consists of blocks
        for piece in [Piece((0,) * len(shape), (0,) * len(shape), shape)] if is_whole else entry.shard.pieces():
            found.append((LocalBox(entry.name, shape, dtype, piece.global_offset, piece.sizes), entry, piece))
    return sorted(found, key=lambda each: -DTYPES[each[0].dtype][1])


def file_layout(boxes: Sequence[LocalBox]) -> tuple[bytes, list[slice]]:
    """The header of a safetensors file, and where in the file the values of each box lie.

    The format is the length of the header (8 bytes, little endian), the header of JSON, and the values in its order.
    """
    told, ends = {}, [0]
    for box in boxes:
        code, item = DTYPES[box.dtype]
        ends.append(ends[-1] + prod(box.sizes) * item)
        told[box.name] = {"dtype": code, "shape": box.sizes, "data_offsets": ends[-2:]}
    text = json.dumps({"__metadata__": {"format": "pt"}, **told}).encode()
    text += b" " * (-len(text) % 8)
    header = len(text).to_bytes(8, "little") + text
    return header, [slice(len(header) + begin, len(header) + end) for begin, end in pairwise(ends)]


def write_safetensors(path: Path, boxes: Sequence[LocalBox], values: Iterable[Tensor]) -> SavedFile:
    """Writes a file one tensor after the other, safely on disk: the library of that name wants all in memory at once.

    Args:
        values: of the boxes, in their order; each is asked for when it is due.
    Raises:
        OSError: it cannot be written.
    """
    with open(path, "wb", buffering=0) as stream:
        _write_all(stream, memoryview(file_layout(boxes)[0]))
        for value in values:
            _write_all(stream, memory_of(value))
        with ThreadPoolExecutor(1) as thread:  # while the disk works, from the memory of the system
            crc32 = thread.submit(checksum, path)
            os.fsync(stream.fileno())
        return SavedFile(path.stat().st_size, crc32.result())


def write_image(path: Path, image: memoryview) -> SavedFile:
    """Writes a file that lies in memory as a whole, safely on disk, beside training: by threads that get what it leaves
    of the cores. Each makes one call for the whole file, and so does not hold the interpreter's lock while it waits.
    """

    def write() -> None:
        with open(path, "wb", buffering=0) as stream:
            _write_all(stream, image)
            os.fsync(stream.fileno())

    with ThreadPoolExecutor(2, initializer=_low_priority) as threads:
        crc32, written = threads.submit(zlib.crc32, image), threads.submit(write)
        written.result()
        return SavedFile(len(image), f"{crc32.result():08x}")


def _low_priority() -> None:
    """A tenth of a core beside threads that train, where no core is free."""
    if sys.platform == "linux":  # where a thread has a priority of its own
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 10)


def _write_all(stream: io.FileIO, memory: memoryview) -> None:
    while memory:
        memory = memory[stream.write(memory) :]


def memory_of(values: Tensor) -> memoryview:
    """All elements in C order, as bytes."""
    flat = values.cpu().contiguous().view(-1)
    return flat.view(torch.uint8).numpy().data if flat.numel() else memoryview(b"")


def checksum(path: Path) -> str:
    """The CRC-32 of a file, 8 hexadecimal digits. Raises OSError."""
    crc32, memory = 0, memoryview(bytearray(_BLOCK))
    with open(path, "rb", buffering=0) as stream:
        while count := stream.readinto(memory):
            crc32 = zlib.crc32(memory[:count], crc32)
    return f"{crc32:08x}"


def damage(path: Path, metadata: Metadata, part: int = 0, parts: int = 1) -> Iterator[tuple[str, str | None]]:
    """Reads every byte of a checkpoint's files.

    Args:
        part: of so many parts the one whose files are read: ranks share them out.
    Yields:
        each file, and what is wrong with it, if anything.
    """

    def problem(name: str) -> str | None:
        file, told = path / name, metadata.files[name]
        if (wrong := size_problem(file, told)) is not None:
            return wrong
        try:
            return None if checksum(file) == told.crc32 else f"{file} was altered: its checksum differs"
        except OSError as error:
            return f"cannot read {file}: {error.strerror}"

    names = list(metadata.files)[part::parts]
    with ThreadPoolExecutor(min(_HASHING_THREADS, os.cpu_count() or 1)) as threads:
        yield from zip(names, threads.map(problem, names), strict=True)


def require_intact(path: Path, metadata: Metadata, part: int = 0, parts: int = 1) -> None:
    """Reads every byte of a checkpoint's files, or of one part of them. Raises DamagedError, which names the files."""
    with reading(path):
        if problems := [problem for _, problem in damage(path, metadata, part, parts) if problem is not None]:
            raise DamagedError(*problems)


def read_boxes(path: Path, saved: Mapping[str, SavedTensor], entries: Iterable[ShardedTensor]) -> None:
    """Copies this rank's parts of saved tensors into its memory; what other ranks need is not read.

    Args:
        entries: each with the shape that it was saved in.
    Raises:
        DamagedError: a file cannot be read, or does not hold what the description says.
    """
    wanted: dict[str, list[_Overlap]] = defaultdict(list)
    needed: Counter[str] = Counter()
    # Boxes of which there are copies come last: those are taken that lie in files that have to be opened anyway.
    for overlaps in sorted(_overlaps(saved, entries), key=len):
        file = max(overlaps, key=lambda file: needed[file])
        wanted[file].append(overlaps[file])
        needed[file] += overlaps[file].target.numel()
    with reading(path) as openable:
        for file, parts in sorted(wanted.items()):
            try:
                with safe_open(openable / file, framework="pt") as content:
                    for part in parts:
                        part.target.copy_(content.get_slice(part.name)[part.slices])
            except (OSError, SafetensorError, ValueError, RuntimeError) as error:
                raise DamagedError(f"cannot read {path / file}: {error}") from None


@dataclass(frozen=True)
class _Overlap:
    """Part of a saved box, and the memory that it goes to."""

    name: str
    slices: tuple[slice, ...]
    target: Tensor


def _overlaps(saved: Mapping[str, SavedTensor], entries: Iterable[ShardedTensor]) -> Iterator[dict[str, _Overlap]]:
    """All that entries have in common with saved boxes; for each such part, by file, where it is found."""
    for entry in entries:
        boxes = saved[entry.name].boxes
        for piece in entry.shard.pieces():
            found: dict[tuple[tuple[int, ...], tuple[int, ...]], dict[str, _Overlap]] = defaultdict(dict)
            for box in _near(boxes, piece):
                if (overlap := _overlap(box, piece, entry.tensor.detach())) is not None:
                    found[box.offsets, box.sizes][box.file] = overlap
            yield from found.values()


def _near(boxes: Sequence[Box], piece: Piece) -> Sequence[Box]:
    """Those that lie in the same rows, soon found among the boxes of thousands of ranks."""
    if len(boxes) < 2 or not piece.sizes:
        return boxes
    first, last = piece.global_offset[0], piece.global_offset[0] + piece.sizes[0]
    return [box for box in boxes if box.offsets[0] < last and first < box.offsets[0] + box.sizes[0]]


def _overlap(box: Box, piece: Piece, local: Tensor) -> _Overlap | None:
    target, slices = piece.of_local(local), []
    spans = zip(box.offsets, box.sizes, piece.global_offset, piece.sizes, strict=True)
    for dim, (saved, length, held, size) in enumerate(spans):
        first, last = max(saved, held), min(saved + length, held + size)
        if first >= last:
            return None
        slices.append(slice(first - saved, last - saved))
        target = target.narrow(dim, first - held, last - first)
    return _Overlap(box.name, tuple(slices), target)
