"""Checkpoints as somebody would craft them: whatever is changed, the checksums belong to it."""

from __future__ import annotations

import io
import json
import pickle
import zipfile
import zlib
from collections.abc import Callable
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from megasnn.checkpoint import read_metadata
from megasnn.checkpoint.checksum import BLOCK
from megasnn.checkpoint.description import METADATA
from megasnn.checkpoint.pieces import DCP_METADATA, PIECES, SavedPiece, SavedTensor, read_pieces


def values_of(path: Path) -> dict[str, Any]:
    """What metadata.json says, without its checksum."""
    values = json.loads((path / METADATA).read_text())
    del values["crc32"]
    return values


def seal(path: Path, text: bytes) -> None:
    """Writes this JSON as metadata.json, with the checksum that belongs to it."""
    covered = text.rstrip().removesuffix(b"}").rstrip()
    (path / METADATA).write_bytes(covered + b',\n  "crc32": "%08x"\n}\n' % zlib.crc32(covered))


def put(path: Path, name: str, content: bytes) -> None:
    """Writes a file of the checkpoint, and its checksum into metadata.json."""
    (path / name).write_bytes(content)
    values = values_of(path)
    values["files"][name] = {"bytes": len(content), "crc32": f"{zlib.crc32(content):08x}"}
    seal(path, json.dumps(values, indent=2).encode())


def as_format_2(path: Path, change: Callable[[Metadata], object] = lambda metadata: None) -> None:
    """Makes it a checkpoint of format 2, which had no pieces.json. The files of values are the same in both.

    Args:
        change: called with what torch's `.metadata` will hold.
    """
    tensors = list(read_pieces(path, read_metadata(path)).values())
    described = {
        tensor.name: TensorStorageMetadata(
            TensorProperties(tensor.torch_dtype),
            torch.Size(tensor.shape),
            [ChunkStorageMetadata(torch.Size(piece.offsets), torch.Size(piece.sizes)) for piece in tensor.pieces],
        )
        for tensor in tensors
    }
    stored = {
        MetadataIndex(tensor.name, piece.offsets, number): _storage_info(tensor, piece)
        for tensor in tensors
        for number, piece in enumerate(tensor.pieces)
    }
    metadata = Metadata(described, None, stored, StorageMeta(path, "id"), "1.0.0")
    change(metadata)
    put_format_2(path, pickle.dumps(metadata))


def put_format_2(path: Path, dcp_metadata: bytes) -> None:
    (path / PIECES).unlink(missing_ok=True)
    values = values_of(path)
    values["format"] = 2
    values.pop("model", None)  # came later
    values["files"].pop(PIECES, None)
    seal(path, json.dumps(values, indent=2).encode())
    put(path, DCP_METADATA, dcp_metadata)


def claiming_memory(legacy: bool) -> bytes:
    """A file of torch.save in which a few bytes ask for two billion."""
    torch.save({"w": "x"}, stream := io.BytesIO(), _use_new_zipfile_serialization=not legacy)
    whole, text = stream.getvalue(), b"X\x01\x00\x00\x00x"
    call = b"cbuiltins\nbytearray\n(J" + (2_000_000_000).to_bytes(4, "little") + b"tR"
    if legacy:
        assert whole.count(text) == 1
        return whole.replace(text, call)
    target = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(whole)) as source, zipfile.ZipFile(target, "w") as made:
        for entry in source.filelist:
            made.writestr(entry.filename, source.read(entry).replace(text, call))
    return target.getvalue()


def _storage_info(tensor: SavedTensor, piece: SavedPiece) -> _StorageInfo:
    info = _StorageInfo(piece.file, piece.position, piece.length)
    checksums = tuple(piece.checksum(block) for block in range(len(piece.crc32) // 8))
    is_large = prod(piece.sizes) * tensor.torch_dtype.itemsize > BLOCK
    info.__dict__.update(crc32=checksums, data=piece.values if is_large else None)
    return info
