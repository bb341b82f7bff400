"""Our own checkpoints as a source, read box by box, every byte of it checked."""

from __future__ import annotations

import os
import weakref
from dataclasses import fields
from pathlib import Path

import torch
from torch import Tensor

from megasnn.checkpoint.description import METADATA, read_metadata
from megasnn.checkpoint.files import PieceReader
from megasnn.checkpoint.folder import hold
from megasnn.checkpoint.pieces import SavedTensor, read_pieces
from megasnn.checkpoint.planner import plan_reading
from megasnn.convert.source import Facts, StoredBox, TensorInfo, TensorSource
from megasnn.sharding import Shard, ShardedTensor


class CheckpointSource(TensorSource):
    """A checkpoint of megasnn, whose tensors are read when they are asked for.

    Args:
        path: of one checkpoint (`.../iter_0000100`).
    Raises:
        CheckpointError: what describes the files is damaged, or a file is missing or of another size.
    """

    kind = "megasnn checkpoint"

    def __init__(self, path: Path) -> None:
        self.path = path
        weakref.finalize(self, os.close, hold(path))  # a run that saves there removes old ones
        told = read_metadata(path)
        self._saved = read_pieces(path, told)
        self._reader = PieceReader(path)
        self.facts = Facts(**{fact.name: getattr(told, fact.name) for fact in fields(Facts)})
        self.files = {name: file.bytes for name, file in told.files.items()}
        self.files |= {METADATA: (path / METADATA).stat().st_size}
        self.tensors = {name: _info(self._saved[name]) for name in told.tensors}

    def read(self, name: str) -> Tensor:
        info = self.tensors[name]
        return self.read_shard(name, Shard(info.shape))

    def read_shard(self, name: str, shard: Shard) -> Tensor:
        value = torch.empty(shard.local_shape, dtype=self.tensors[name].dtype)
        self._reader.read(plan_reading([ShardedTensor(name, value, shard, False)], self._saved))
        return value


def _info(saved: SavedTensor) -> TensorInfo:
    boxes = tuple(StoredBox(piece.file, piece.offsets, piece.sizes) for piece in saved.pieces)
    return TensorInfo(saved.shape, saved.torch_dtype, boxes)
