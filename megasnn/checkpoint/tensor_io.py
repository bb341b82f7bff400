"""The safetensors files of a checkpoint: written tensor by tensor, checked as a whole, read by boxes."""

from __future__ import annotations

import json
import os
import zlib
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import chain
from math import prod
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from megasnn.checkpoint.folder import reading
from megasnn.checkpoint.format import DTYPES, Box, Metadata, SavedFile, SavedTensor, size_problem
from megasnn.files.durable import sync
from megasnn.files.problems import CheckpointError, DamagedError
from megasnn.sharded_tensors import ShardedTensor
from megasnn.sharding import Piece

_BLOCK = 4 << 20
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


def write_safetensors(path: Path, boxes: Sequence[LocalBox], values: Iterable[Tensor]) -> None:
    """Writes a safetensors file, one tensor after the other. Raises OSError.

    The library of that name wants all tensors in memory at once. The format is the length of a header (8 bytes, little
    endian), the header of JSON, and the values in its order.

    Args:
        values: of the boxes, in their order; each is asked for when it is due.
    """
    header, end = {}, 0
    for box in boxes:
        code, item = DTYPES[box.dtype]
        begin, end = end, end + prod(box.sizes) * item
        header[box.name] = {"dtype": code, "shape": box.sizes, "data_offsets": [begin, end]}
    text = json.dumps({"__metadata__": {"format": "pt"}, **header}).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb", buffering=0) as stream:
        for memory in chain([memoryview(len(text).to_bytes(8, "little") + text)], map(memory_of, values)):
            while memory:
                memory = memory[stream.write(memory) :]


def memory_of(values: Tensor) -> memoryview:
    """All elements in C order, as bytes."""
    flat = values.cpu().contiguous().view(-1)
    return flat.view(torch.uint8).numpy().data if flat.numel() else memoryview(b"")


def synced(path: Path) -> SavedFile:
    """Waits until a file is on disk, and meanwhile computes its checksum from the memory of the system."""
    with ThreadPoolExecutor(1) as thread:
        crc32 = thread.submit(checksum, path)
        sync(path)
        return SavedFile(path.stat().st_size, crc32.result())


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
