"""Our own checkpoints as a source, read box by box, every byte of it checked."""

from __future__ import annotations

import os
import weakref
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from megasnn.checkpoint.description import METADATA, read_metadata
from megasnn.checkpoint.files import DCP_METADATA, PieceReader, SavedPiece, read_dcp_metadata
from megasnn.checkpoint.folder import hold
from megasnn.checkpoint.planner import plan_reading
from megasnn.convert.source import Facts, StoredBox, TensorInfo, TensorSource
from megasnn.sharding import Shard, ShardedTensor


class CheckpointSource(TensorSource):
    """
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
        self._saved = read_dcp_metadata(path, int(told.files[DCP_METADATA]["crc32"], 16))
        self._reader = PieceReader(path, self._saved)
        self.facts = Facts(
            told.iteration, told.consumed_samples, told.config, told.extra, told.optimizer, told.layout, told.versions
        )
        self.files = {name: file["bytes"] for name, file in told.files.items()}
        self.files |= {METADATA: (path / METADATA).stat().st_size}
        file_of = {
            (index.fqn, tuple(index.offset)): SavedPiece.of(info).file
            for index, info in self._saved.storage_data.items()
        }
        self.tensors = {name: self._describe(name, file_of) for name in told.tensors}

    def _describe(self, name: str, file_of: dict[tuple[str, tuple[int, ...]], str]) -> TensorInfo:
        saved = self._saved.state_dict_metadata[name]
        assert isinstance(saved, TensorStorageMetadata)
        boxes = tuple(
            StoredBox(file_of[name, tuple(chunk.offsets)], tuple(chunk.offsets), tuple(chunk.sizes))
            for chunk in saved.chunks
        )
        return TensorInfo(tuple(saved.size), saved.properties.dtype, boxes)

    def read(self, name: str) -> Tensor:
        info = self.tensors[name]
        return self.read_shard(name, Shard(info.shape))

    def read_shard(self, name: str, shard: Shard) -> Tensor:
        value = torch.empty(shard.local_shape, dtype=self.tensors[name].dtype)
        self._reader.read(plan_reading([ShardedTensor(name, value, shard, False)], self._saved))
        return value
