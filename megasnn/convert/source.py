"""A checkpoint or a file of weights as names with shapes, and tensors that are read one at a time."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megasnn.checkpoint.folder import find_checkpoint
from megasnn.checkpoint.format import METADATA, Metadata, read_metadata
from megasnn.checkpoint.state_dict import read_state_dict
from megasnn.checkpoint.tensor_io import read_boxes
from megasnn.files import CheckpointError
from megasnn.models.registry import dialect_of, is_ours
from megasnn.models.weight_names import Recipe
from megasnn.parallel.sharding import Shard, ShardedTensor


@dataclass(frozen=True)
class Source:
    """Tensors by name.

    Attributes:
        path: file or folder.
        tensors: on the meta device, for their shapes and types.
        read: gives one of them, complete and contiguous, on the CPU.
        metadata: of a checkpoint; empty for a file.
        is_checkpoint: False for a file.
    """

    path: Path
    tensors: Mapping[str, Tensor]
    read: Callable[[str], Tensor]
    metadata: Metadata = Metadata()
    is_checkpoint: bool = False

    @property
    def dimensions(self) -> dict[str, Any] | None:
        """The model's dimensions; None where they are not known."""
        found = (self.metadata.config or {}).get("model")
        return found if isinstance(found, dict) else None

    def read_shard(self, name: str, shard: Shard) -> Tensor:
        """Part of a checkpoint's tensor. Raises DamagedError."""
        value = torch.empty(shard.local_shape, dtype=self.tensors[name].dtype)
        read_boxes(self.path, self.metadata.tensors, [ShardedTensor(name, value, shard, False)])
        return value


def open_source(path: Path, step: int | None = None, key: str | None = None) -> Source:
    """Opens a file of torch.save or safetensors, a run's folder of checkpoints, or one checkpoint in it.

    Args:
        step: iteration, for a run's folder; the latest when not given.
        key: place of the state_dict in a file.
    Raises:
        CheckpointError: there is nothing, or nothing that can be read.
    """
    if path.is_dir():
        return _open_checkpoint(path if (path / METADATA).is_file() else find_checkpoint(path, step))
    if not path.is_file():
        raise CheckpointError(f"{path} is not there: name a file of weights or a folder of checkpoints")
    if step is not None:
        raise CheckpointError(f"{path} is a single file and has no iteration {step} to choose (--ckpt-step)")
    values = read_state_dict(path, key)
    return Source(path, {name: value.to("meta") for name, value in values.items()}, lambda name: values[name])


def _open_checkpoint(path: Path) -> Source:
    metadata = read_metadata(path)
    tensors = {
        name: torch.empty(saved.shape, dtype=getattr(torch, saved.dtype), device="meta")
        for name, saved in metadata.tensors.items()
    }

    def read(name: str) -> Tensor:
        return source.read_shard(name, Shard(metadata.tensors[name].shape))

    source = Source(path, tensors, read, metadata, True)
    return source


def in_our_names(source: Source) -> Source:
    """The same tensors under our global names. Raises CheckpointError for names of no program known here."""
    if source.metadata.model or source.metadata.config is not None or is_ours(source.tensors):
        return source
    return derived(source, dialect_of(source.tensors).to_ours(source.tensors))


def derived(source: Source, recipe: Recipe) -> Source:
    """Tensors made from those of another source when they are read. Raises CheckpointError where they do not fit
    together."""

    def make(read: Callable[[str], Tensor], name: str) -> Tensor:
        return recipe[name].of(map(read, recipe[name].sources)).contiguous()

    tensors = {name: make(source.tensors.__getitem__, name) for name in recipe}
    return replace(source, tensors=tensors, read=partial(make, source.read))
