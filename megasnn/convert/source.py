"""Tensors of some format as names with shapes, each read when it is asked for: no more than one need be in memory."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megasnn.checkpoint.saving import Progress
from megasnn.models.names import Recipe
from megasnn.sharding import Shard


@dataclass(frozen=True)
class StoredBox:
    """A box of a tensor in a file; offsets and sizes have one entry per dimension."""

    file: str
    offset: tuple[int, ...]
    sizes: tuple[int, ...]


@dataclass(frozen=True)
class TensorInfo:
    """What is known of a tensor before it is read; `boxes` where it is stored, empty when it is computed."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    boxes: tuple[StoredBox, ...] = ()

    @property
    def elements(self) -> int:
        return torch.Size(self.shape).numel()

    @property
    def bytes(self) -> int:
        return self.elements * self.dtype.itemsize

    @property
    def dtype_name(self) -> str:
        return str(self.dtype).removeprefix("torch.")


@dataclass(frozen=True)
class Facts(Progress):
    """What a checkpoint says of itself; other files say nothing.

    Attributes:
        optimizer: class name of the optimizer whose state is inside; None without one.
        versions: of the programs that wrote it.
    """

    optimizer: str | None = None
    versions: Mapping[str, str] = field(default_factory=dict)

    @property
    def dimensions(self) -> dict[str, Any] | None:
        """The model's dimensions; None when unknown."""
        found = (self.config or {}).get("model")
        return found if isinstance(found, dict) else None


class TensorSource(ABC):
    """Tensors of a file or folder, by name.

    Attributes:
        path: file or folder.
        kind: of format, for the reader.
        tensors: all of them by name.
        facts: what the source says of itself.
        files: name -> bytes, of every file that belongs to it.
    """

    path: Path
    kind: str
    tensors: Mapping[str, TensorInfo]
    facts: Facts
    files: Mapping[str, int]

    @abstractmethod
    def read(self, name: str) -> Tensor:
        """One whole tensor, contiguous, on the CPU. Raises CheckpointError when the file is damaged."""

    def read_shard(self, name: str, shard: Shard) -> Tensor:
        """What a rank holds of a tensor."""
        return shard.cut(self.read(name))


class DerivedSource(TensorSource):
    """Tensors made from those of another source, when they are asked for."""

    def __init__(self, base: TensorSource, recipe: Recipe) -> None:
        self._base, self._recipe = base, recipe
        self.path, self.kind, self.facts, self.files = base.path, base.kind, base.facts, base.files
        self.tensors = {name: self._describe(name) for name in recipe}

    def _describe(self, name: str) -> TensorInfo:
        made = self._recipe[name]
        infos = [self._base.tensors[source] for source in made.sources]
        value = made.of(torch.empty(info.shape, dtype=info.dtype, device="meta") for info in infos)
        return TensorInfo(tuple(value.shape), value.dtype, infos[0].boxes if made.make is None else ())

    def read(self, name: str) -> Tensor:
        made = self._recipe[name]
        return made.of(map(self._base.read, made.sources)).contiguous()
