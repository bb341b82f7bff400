"""The safetensors files of a checkpoint: written tensor by tensor, checked as a whole, read by boxes."""

from __future__ import annotations

import json
import os
import zlib
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from megasnn.checkpoint.format import DTYPES, Box, Metadata, SavedFile, SavedTensor, read_metadata, size_problem
from megasnn.files import CheckpointError, DamagedError
from megasnn.parallel.sharding import Piece, ShardedTensor

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
        """Name in a file: that of a complete tensor is its own, so that other programs find it by it."""
        return self.tensor if self.sizes == self.shape else f"{self.tensor}@{','.join(map(str, self.offsets))}"

    @property
    def nbytes(self) -> int:
        return prod(self.sizes) * DTYPES[self.dtype][1]

    def in_file(self, file: str) -> Box:
        return Box(file, self.name, self.offsets, self.sizes)


def dtype_name(value: Tensor) -> str:
    return str(value.dtype).removeprefix("torch.")


def boxes_of(entries: Iterable[ShardedTensor]) -> list[tuple[LocalBox, ShardedTensor, Piece]]:
    """Boxes of a rank's tensors, the largest type first: so all values in a file are aligned."""
    found = []
    for entry in entries:
        if (dtype := dtype_name(entry.tensor)) not in DTYPES:
            raise CheckpointError(f"{entry.name}: {entry.tensor.dtype} cannot be saved; known: {', '.join(DTYPES)}")
        shape = entry.shard.global_shape
        is_whole = entry.shard.local_shape == shape  # even where it consists of blocks
        for piece in [Piece((0,) * len(shape), (0,) * len(shape), shape)] if is_whole else entry.shard.pieces():
            found.append((LocalBox(entry.name, shape, dtype, piece.global_offset, piece.sizes), entry, piece))
    return sorted(found, key=lambda each: -DTYPES[each[0].dtype][1])


def write_safetensors(path: Path, boxes: Sequence[LocalBox], values: Iterable[Tensor]) -> SavedFile:
    """Writes a file one tensor after the other, safely on disk: `save_file` wants all of them in memory at once.

    The format is the length of the header (8 bytes, little endian), the header of JSON, and the values in its order.

    Args:
        values: of the boxes, in their order; each is asked for when it is due.
    Raises:
        OSError: it cannot be written.
    """
    header, end = {}, 0
    for box in boxes:
        offsets = [end, end := end + box.nbytes]
        header[box.name] = {"dtype": DTYPES[box.dtype][0], "shape": box.sizes, "data_offsets": offsets}
    text = json.dumps({"__metadata__": {"format": "pt"}, **header}).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb", buffering=0) as stream:
        _write_all(stream.fileno(), memoryview(len(text).to_bytes(8, "little") + text))
        for value in values:
            flat = value.cpu().contiguous().view(-1)
            if flat.numel():
                _write_all(stream.fileno(), flat.view(torch.uint8).numpy().data)
        with ThreadPoolExecutor(1) as thread:  # reads from the memory of the system while the disk works
            crc32 = thread.submit(checksum, path)
            os.fsync(stream.fileno())
        return SavedFile(path.stat().st_size, crc32.result())


def _write_all(handle: int, memory: memoryview) -> None:
    while memory:
        memory = memory[os.write(handle, memory) :]


def checksum(path: Path) -> str:
    """CRC-32 of a file, 8 hexadecimal digits. Raises OSError."""
    crc32, memory = 0, memoryview(bytearray(_BLOCK))
    with open(path, "rb", buffering=0) as stream:
        while count := stream.readinto(memory):
            crc32 = zlib.crc32(memory[:count], crc32)
    return f"{crc32:08x}"


def verify_checkpoint(
    path: Path, metadata: Metadata | None = None, part: int = 0, parts: int = 1
) -> Iterator[tuple[int, str | None]]:
    """Reads every byte of one checkpoint's files (`.../iter_0000100`) and checks it.

    Args:
        part: of so many parts the one whose files are read: ranks share them out.
    Yields:
        for each file the number of its bytes, and what is wrong with it, or None.
    Raises:
        CheckpointError: the description of the files is damaged itself.
    """
    files = (metadata or read_metadata(path)).files

    def problem(name: str) -> str | None:
        if (wrong := size_problem(path / name, files[name])) is not None:
            return wrong
        try:
            is_intact = checksum(path / name) == files[name].crc32
            return None if is_intact else f"{path / name} was altered: its checksum differs"
        except OSError as error:
            return f"cannot read {path / name}: {error.strerror}"

    names = list(files)[part::parts]
    with ThreadPoolExecutor(min(_HASHING_THREADS, os.cpu_count() or 1)) as threads:
        yield from zip((files[name].bytes for name in names), threads.map(problem, names), strict=True)


def require_intact(path: Path, metadata: Metadata, part: int = 0, parts: int = 1) -> None:
    """Raises DamagedError, which names the damaged files; see `verify_checkpoint`."""
    if problems := [problem for _, problem in verify_checkpoint(path, metadata, part, parts) if problem is not None]:
        raise DamagedError(*problems)


def read_boxes(path: Path, saved: Mapping[str, SavedTensor], entries: Iterable[ShardedTensor]) -> None:
    """Copies this rank's parts of saved tensors into its memory; boxes that only other ranks need are not read.

    Args:
        entries: each with the shape that it was saved in.
    Raises:
        DamagedError: a file cannot be read, or does not hold what the description says.
    """
    wanted: dict[str, list[_Overlap]] = defaultdict(list)
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
                    for part in parts:
                        part.target.copy_(content.get_slice(part.name)[part.slices])
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


@dataclass(frozen=True)
class _Overlap:
    """Part of a saved box, and the memory that it goes to."""

    name: str
    slices: tuple[slice, ...]
    target: Tensor


def _overlaps(saved: Mapping[str, SavedTensor], entries: Iterable[ShardedTensor]) -> Iterator[dict[str, _Overlap]]:
    """Everything that entries have in common with saved boxes: for each such part, by file, its overlap."""
    for entry in entries:
        boxes = saved[entry.name].boxes
        for piece in entry.shard.pieces():
            found: dict[tuple[tuple[int, ...], tuple[int, ...]], dict[str, _Overlap]] = defaultdict(dict)
            for box in boxes:
                if (overlap := _overlap(box, piece, entry.tensor.detach())) is not None:
                    found[box.offsets, box.sizes][box.file] = overlap
            yield from found.values()


def _overlap(box: Box, piece: Piece, local: Tensor) -> _Overlap | None:
    spans = [
        (max(saved, own), min(saved + length, own + size))
        for saved, length, own, size in zip(box.offsets, box.sizes, piece.global_offset, piece.sizes, strict=True)
    ]
    if any(first >= last for first, last in spans):
        return None
    target = piece.of_local(local)
    for dim, (first, last) in enumerate(spans):
        target = target.narrow(dim, first - piece.global_offset[dim], last - first)
    slices = (slice(first - saved, last - saved) for (first, last), saved in zip(spans, box.offsets, strict=True))
    return _Overlap(box.name, tuple(slices), target)
