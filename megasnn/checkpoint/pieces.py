"""`pieces.json`: which box of which tensor lies where in a checkpoint's files, and the checksums of its blocks.

All of it is checked against the files' sizes before anything is allocated or read.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise, product
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import numpy as np
from pydantic import FailFast, Field, with_config

from megasnn.checkpoint.checksum import BLOCK, block_lengths, file_checksum, joined
from megasnn.checkpoint.description import METADATA, FileFacts, GlobalName, Metadata, TensorFacts
from megasnn.checkpoint.format_2 import saved_in
from megasnn.files.described import (
    STRICT,
    Count,
    DescriptionError,
    DtypeName,
    PlainName,
    Shape,
    described,
    open_within,
    read_bounded,
)
from megasnn.files.durable import write_whole
from megasnn.files.problems import DamagedError, problem_list

if TYPE_CHECKING:
    import torch

PIECES = "pieces.json"
DCP_METADATA = ".metadata"
COPY = "copy."
"""Names of copies begin so, which a checkpoint laid out for certain ranks holds beside the tensors."""
_LARGEST = 256 << 20
MOST_VALUES = 4_000_000
_MOST_PIECES = 4096
_MOST_STARTS = 64  # for each box; beyond that, comparing every two of them takes less
_SHORTEST_HEADER = 30  # of a member of a zip archive


@with_config(STRICT)
@dataclass(frozen=True)
class SavedPiece:
    """A saved box of a tensor.

    Attributes:
        offsets, sizes: the box, with an entry for each dimension.
        file, position, length: its bytes, which are what `torch.save` writes for a tensor.
        crc32: of each block of these bytes, eight hexadecimal digits for each.
        values: where in these bytes the elements begin, in C order; None for small pieces of format 2.
    """

    offsets: Shape
    sizes: Shape
    file: PlainName
    position: Count
    length: Count
    crc32: Annotated[str, Field(pattern="^([0-9a-f]{8})*$")]
    values: Count | None

    def checksum(self, block: int) -> int:
        return int(self.crc32[8 * block : 8 * block + 8], 16)


@with_config(STRICT)
@dataclass(frozen=True)
class SavedTensor:
    """A saved tensor and its pieces."""

    name: GlobalName
    shape: Shape
    dtype: DtypeName
    pieces: Annotated[tuple[SavedPiece, ...], FailFast(), Field(max_length=_MOST_PIECES)]

    @property
    def torch_dtype(self) -> torch.dtype:
        import torch  # here: the process that writes checkpoints does without

        return getattr(torch, self.dtype)

    @property
    def facts(self) -> TensorFacts:
        return TensorFacts(self.shape, self.dtype)


@with_config(STRICT)
@dataclass(frozen=True)
class _Content:
    tensors: Annotated[tuple[SavedTensor, ...], FailFast()]


def write_pieces(path: Path, tensors: Iterable[SavedTensor]) -> None:
    """Writes `pieces.json` of one checkpoint, safely on disk. Raises DescriptionError for what could not be read."""
    content = json.dumps(_Content(tuple(tensors)), default=vars).encode()
    described(_Content, content, path / PIECES, most_values=MOST_VALUES)
    write_whole(path / PIECES, content.decode())


def values_of(tensors: Iterable[SavedTensor]) -> int:
    """Of how many values `pieces.json` consists, for this rank's pieces: over all ranks, the sum.

    Of each tensor one rank has the piece at its beginning, and counts what is told of the tensor once.
    """
    found = 0
    for tensor in tensors:
        found += sum(_values(piece) + 1 for piece in tensor.pieces)  # with the comma behind it
        if any(not any(piece.offsets) for piece in tensor.pieces):
            found += _values(replace(tensor, pieces=()))
    return found


def _values(described: SavedPiece | SavedTensor) -> int:
    text = json.dumps(described, default=vars)
    return sum(map(text.count, ",[{"))


def by_file(tensors: Iterable[SavedTensor]) -> dict[str, list[tuple[SavedPiece, SavedTensor]]]:
    """All pieces of each file, in their order, with the tensors that they are of."""
    pieces: dict[str, list[tuple[SavedPiece, SavedTensor]]] = {}
    for tensor in tensors:
        for piece in tensor.pieces:
            pieces.setdefault(piece.file, []).append((piece, tensor))
    return {name: sorted(found, key=lambda pair: pair[0].position) for name, found in sorted(pieces.items())}


def file_checksum_of(pieces: Iterable[SavedPiece]) -> int:
    """The CRC-32 of the file that consists of these pieces."""
    return joined(
        (piece.checksum(block), length) for piece in pieces for block, length in enumerate(block_lengths(piece.length))
    )


def read_pieces(path: Path, metadata: Metadata) -> dict[str, SavedTensor]:
    """All saved tensors of one checkpoint, by name, copies among them.

    Raises:
        DamagedError: what describes them was altered, or is not possible with the files that there are.
    """
    source = path / (PIECES if metadata.has_pieces else DCP_METADATA)
    told = metadata.files.get(source.name)
    if told is None:
        raise DamagedError(
            f"{path / METADATA}: files: should list {source.name}, found {', '.join(metadata.files)[:200]}"
        )
    try:
        with open_within(path, source.name) as stream:
            content = read_bounded(stream, source, _LARGEST)
        if f"{zlib.crc32(content):08x}" != told.crc32:
            raise DamagedError(f"{source} was altered: its checksum differs")
        text = content if metadata.has_pieces else json.dumps(saved_in(content, source)).encode()
        tensors = described(_Content, text, source, most_values=MOST_VALUES).tensors
        if metadata.has_pieces and DCP_METADATA in metadata.files:
            _require_checksum(path, DCP_METADATA, metadata.files[DCP_METADATA])
    except OSError as error:
        raise DamagedError(f"cannot read {source}: {error}") from None
    except DescriptionError as error:
        raise DamagedError(*error.args) from None
    if problems := list(_problems(tensors, metadata)):
        raise problem_list(
            f"{source} is not of the files and tensors that metadata.json lists:", problems, DamagedError
        )
    return {tensor.name: tensor for tensor in tensors}


def _require_checksum(path: Path, name: str, told: FileFacts) -> None:
    with open_within(path, name) as stream:
        if f"{file_checksum(stream):08x}" != told.crc32:
            raise DamagedError(f"{path / name} was altered: its checksum differs")


def _problems(tensors: Iterable[SavedTensor], metadata: Metadata) -> Iterator[str]:
    seen: dict[str, TensorFacts] = {}
    for tensor in tensors:
        if tensor.name in seen:
            yield f"{tensor.name}: is there twice"
        seen[tensor.name] = tensor.facts
        wrong = [problem for piece in tensor.pieces for problem in _piece_problems(tensor, piece, metadata.files)]
        yield from wrong
        if not wrong and not covers_once(tensor.shape, [(piece.offsets, piece.sizes) for piece in tensor.pieces]):
            yield f"{tensor.name}: the pieces do not hold each element of its shape {list(tensor.shape)} once"
    for name in seen.keys() | metadata.tensors.keys():
        here, there = seen.get(name), metadata.tensors.get(name)
        if here != there and not (there is None and name.startswith(COPY)):
            yield f"{name}: the files do not hold what metadata.json says: {_text(here)} and {_text(there)}"
    for name, pieces in by_file(tensors).items():
        if any(a.position + a.length > b.position for (a, _), (b, _) in pairwise(pieces)):
            yield f"{name}: its pieces overlap"


def _text(facts: TensorFacts | None) -> str:
    return f"{facts.dtype} {list(facts.shape)}" if facts else "nothing"


def _piece_problems(tensor: SavedTensor, piece: SavedPiece, files: Mapping[str, FileFacts]) -> Iterator[str]:
    place = f"{tensor.name}, piece at {list(piece.offsets)}"
    dimensions = zip(tensor.shape, piece.offsets, piece.sizes, strict=False)
    if len(piece.offsets) != len(tensor.shape) or len(piece.sizes) != len(tensor.shape):
        yield f"{place}: offsets and sizes should have {len(tensor.shape)} entries, sizes are {list(piece.sizes)}"
    elif any(offset + size > whole for whole, offset, size in dimensions):
        yield f"{place}: sizes {list(piece.sizes)} go beyond the shape {list(tensor.shape)}"
    size = files[piece.file].bytes if piece.file in files else 0
    if piece.position + piece.length > size:
        yield f"{place}: bytes {piece.position} + {piece.length} are not in {piece.file}, which has {size}"
    if len(piece.crc32) != 8 * -(-piece.length // BLOCK):
        yield f"{place}: {len(piece.crc32) // 8} checksums for a length of {piece.length}"
    item = tensor.torch_dtype.itemsize
    if (piece.values or 0) + prod(piece.sizes) * item > piece.length:
        values = f"{list(piece.sizes)} of {tensor.dtype} at {piece.values}"
        yield f"{place}: {values} are not in {piece.length} bytes"
    if piece.values is not None and (piece.values % item or piece.values < _SHORTEST_HEADER):
        yield f"{place}: values at {piece.values} are not aligned for {tensor.dtype}, or lie in the archive's header"
    if piece.values is None and piece.length > 2 * BLOCK:
        yield f"{place}: does not say where the values begin"


def covers_once(shape: tuple[int, ...], boxes: list[tuple[tuple[int, ...], tuple[int, ...]]]) -> bool:
    """Whether boxes (offsets, sizes) within a shape hold each of its elements exactly once."""
    if sum(prod(sizes) for _, sizes in boxes) != prod(shape):
        return False
    if len(boxes) < 2:
        return True
    filled = [box for box in boxes if prod(box[1])]
    starts = np.array([offsets for offsets, _ in filled], np.int64).reshape(len(filled), len(shape))
    ends = starts + np.array([sizes for _, sizes in filled], np.int64).reshape(starts.shape)
    # Two boxes have something in common where they both hold an element that is a start in every dimension. Boxes that
    # ranks hold start in few places.
    edges = [np.unique(starts[:, dim]) for dim in range(len(shape))]
    if prod(map(len, edges)) > _MOST_STARTS * len(filled):
        return not any(
            ((starts[one] < ends[one + 1 :]) & (starts[one + 1 :] < ends[one])).all(1).any()
            for one in range(len(filled))
        )
    held = np.zeros([len(each) + 1 for each in edges], np.int32)
    for corner in product((False, True), repeat=len(shape)):
        places = zip(corner, edges, starts.T, ends.T, strict=True)
        index = tuple(np.searchsorted(each, last if is_end else first) for is_end, each, first, last in places)
        np.add.at(held, index, (-1) ** sum(corner))
    for dim in range(len(shape)):
        held = held.cumsum(dim)
    return bool(held.max(initial=0) <= 1)
