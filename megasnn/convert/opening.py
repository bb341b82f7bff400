"""Opening whatever a path leads to: our own checkpoints, and files of weights."""

from __future__ import annotations

import os
import weakref
from dataclasses import fields
from pathlib import Path

import torch
from torch import Tensor

from megasnn.checkpoint import CheckpointError, find_checkpoint
from megasnn.checkpoint.description import METADATA, read_metadata
from megasnn.checkpoint.files import PieceReader
from megasnn.checkpoint.folder import hold
from megasnn.checkpoint.pieces import SavedTensor, read_pieces
from megasnn.checkpoint.planner import plan_reading
from megasnn.convert.safetensors_file import SafetensorsSource
from megasnn.convert.source import DerivedSource, Facts, StoredBox, TensorInfo, TensorSource
from megasnn.convert.torch_file import TorchFileSource
from megasnn.models.dialects import dialect_of, is_ours
from megasnn.sharded_tensors import ShardedTensor
from megasnn.sharding import Shard


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
        # Which checkpoint is the best one is told by the folder, not by the checkpoint.
        self.facts = Facts(**{fact.name: getattr(told, fact.name) for fact in fields(Facts) if fact.name != "best"})
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


SUFFIX = ".safetensors"


def open_source(path: Path, step: int | None = None) -> TensorSource:
    """A file of torch.save or safetensors, a run's folder of checkpoints, or one checkpoint in it.

    Args:
        step: iteration, for a run's folder; the latest when not given.
    Raises:
        CheckpointError: there is nothing, or nothing that can be read.
    """
    if path.is_file():
        if step is not None:
            raise CheckpointError(f"{path} is a single file and has no iteration {step} to choose (--ckpt-step)")
        return SafetensorsSource(path) if path.suffix == SUFFIX else TorchFileSource(path)
    if not path.is_dir():
        what = "neither a file nor a folder" if path.exists() else "not there"
        raise CheckpointError(f"{path} is {what}: name a file of weights or a folder of checkpoints")
    if (path / METADATA).is_file():
        return CheckpointSource(path)
    return CheckpointSource(find_checkpoint(path, step))


def in_our_names(source: TensorSource) -> TensorSource:
    """The same tensors under our global names. Raises CheckpointError for names of no program known here."""
    if source.facts.model or source.facts.config is not None or is_ours(source.tensors):
        return source
    return DerivedSource(source, dialect_of(source.tensors).to_ours(source.tensors))
