"""Whole tensors of checkpoints in one process, for tools and tests, and the check of every byte."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megasnn.checkpoint.description import BESIDE, read_metadata
from megasnn.checkpoint.files import PieceReader
from megasnn.checkpoint.folder import reading
from megasnn.checkpoint.loading import first_intact, read_tensors
from megasnn.checkpoint.pieces import DCP_METADATA, PIECES, by_file, file_checksum_of, read_pieces
from megasnn.checkpoint.saving import PathLike, save_checkpoint
from megasnn.sharding import Shard, ShardedTensor


def load_global_tensors(
    folder: PathLike, step: int | None = None, *, prefix: str = "", with_optimizer: bool = False
) -> dict[str, Tensor]:
    """Whole tensors of a checkpoint by global name, on the CPU, in one process.

    Warns when it is not the latest that they are of, because that one is damaged.

    Args:
        prefix: only names that start so.
        with_optimizer: the optimizer's state and the average of the weights too.

    Raises:
        CheckpointError: as `load_checkpoint`.
    """

    def load(path: Path) -> dict[str, Tensor]:
        metadata = read_metadata(path)
        saved = read_pieces(path, metadata)
        tensors = {
            name: torch.empty(saved[name].shape, dtype=saved[name].torch_dtype)
            for name in metadata.tensors
            if name.startswith(prefix) and (with_optimizer or not name.startswith(BESIDE))
        }
        read_tensors(path, saved, _whole(tensors), None)
        return tensors

    tensors, remarks = first_intact(folder, step, None, load)
    for remark in remarks:
        warnings.warn(remark, stacklevel=2)
    return tensors


def save_global_tensors(
    folder: PathLike,
    tensors: Mapping[str, Tensor],
    *,
    iteration: int = 0,
    model: str | None = None,
    config: dict[str, Any] | None = None,
    extra: dict[str, Any] | None = None,
) -> Path:
    """Writes whole tensors, in one process, as a checkpoint of weights only; load it with --finetune."""
    return save_checkpoint(
        folder,
        iteration=iteration,
        consumed_samples=0,
        tensors=_whole(tensors),
        optimizer=None,
        extra=extra or {},
        config=config,
        layout=None,
        model=model,
    )


def _whole(tensors: Mapping[str, Tensor]) -> list[ShardedTensor]:
    return [ShardedTensor(name, value, Shard(tuple(value.shape)), False) for name, value in tensors.items()]


def verify_checkpoint(path: Path) -> Iterator[tuple[int, str | None]]:
    """Reads every byte of one checkpoint (`.../iter_0000100`) and checks it.

    Yields:
        for each piece of a file the number of its bytes, and what is wrong with it, or None.
    Raises:
        CheckpointError: what describes the files is damaged itself, or a file is missing or of another size.
    """
    with reading(path):
        metadata = read_metadata(path)
        reader, files = PieceReader(path), by_file(read_pieces(path, metadata).values())
        for name in sorted(metadata.files.keys() - {DCP_METADATA, PIECES}):
            pieces = files.get(name, [])
            yield from reader.damage(name, pieces)
            if f"{file_checksum_of(piece for piece, _ in pieces):08x}" != metadata.files[name].crc32:
                yield 0, f"{path / name}: metadata.json and what describes its pieces tell different checksums"
