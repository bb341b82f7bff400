"""Makes a complete checkpoint of the files that the ranks have written: its descriptions, then its name.

Nothing here needs torch: it is done in the process that writes beside training.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from megasnn.checkpoint import folder as folders
from megasnn.checkpoint.checksum import file_checksum
from megasnn.checkpoint.description import FileFacts, Metadata
from megasnn.checkpoint.pieces import (
    COPY,
    DCP_METADATA,
    PIECES,
    SavedPiece,
    SavedTensor,
    by_file,
    file_checksum_of,
    write_pieces,
)
from megasnn.files.described import open_within
from megasnn.files.durable import sync


@dataclass(frozen=True)
class Content:
    """What the files of a checkpoint hold; the same for each save of the same tensors.

    Attributes:
        tensors: where their pieces lie, without checksums, in the order of their names.
        for_torch: `.metadata`, torch's own description.
    """

    tensors: tuple[SavedTensor, ...]
    for_torch: bytes


def complete(
    root: Path, metadata: Metadata, content: Content, checksums: Sequence[Sequence[str]], best: bool = False
) -> Path:
    """Makes what was written since `folder.begin` the checkpoint of its iteration and the latest, safely on disk.

    Args:
        metadata: without tensors and files.
        checksums: of the pieces of each rank's file, in their order.
        best: whether it is the best, too.
    """
    aside = folders.aside_folder(root, metadata.iteration)
    tensors = _with_checksums(content.tensors, checksums)
    write_pieces(aside, tensors)
    (aside / DCP_METADATA).write_bytes(content.for_torch)
    sync(aside / DCP_METADATA)
    sums = {name: file_checksum_of(piece for piece, _ in pieces) for name, pieces in by_file(tensors).items()}
    for name in (PIECES, DCP_METADATA):
        with open_within(aside, name) as stream:
            sums[name] = file_checksum(stream)
    files = {
        name: FileFacts((aside / name).stat().st_size, f"{checksum:08x}") for name, checksum in sorted(sums.items())
    }
    facts = {tensor.name: tensor.facts for tensor in tensors if not tensor.name.startswith(COPY)}
    return folders.commit(root, replace(metadata, tensors=facts, files=files), best)


def file_name(rank: int) -> str:
    """The file that this rank writes, as torch.distributed.checkpoint calls it."""
    return f"__{rank}_0.distcp"


def _with_checksums(tensors: Sequence[SavedTensor], checksums: Sequence[Sequence[str]]) -> list[SavedTensor]:
    files = by_file(tensors)
    found: dict[tuple[str, int], str] = {}
    for rank, of_rank in enumerate(checksums):
        pieces = files.get(file_name(rank), ())
        found |= {(piece.file, piece.position): crc32 for (piece, _), crc32 in zip(pieces, of_rank, strict=True)}

    def complete_piece(piece: SavedPiece) -> SavedPiece:
        return replace(piece, crc32=found[piece.file, piece.position])

    return [replace(tensor, pieces=tuple(map(complete_piece, tensor.pieces))) for tensor in tensors]
