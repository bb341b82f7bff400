"""A checkpoint or a file of weights as tensors by name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megasnn.checkpoint.folder import resolve
from megasnn.checkpoint.format import Metadata, read_metadata
from megasnn.checkpoint.state_dict import read_state_dict
from megasnn.checkpoint.tensor_io import read_full
from megasnn.files import CheckpointError
from megasnn.models.registry import dialect_of, model_of
from megasnn.models.weight_names import NameMap


@dataclass(frozen=True)
class Source:
    """Tensors by name.

    Attributes:
        path: file or folder.
        tensors: complete, on the CPU; of a checkpoint opened without values on the meta device.
        metadata: of a checkpoint; empty for a file.
        is_checkpoint: False for a file.
    """

    path: Path
    tensors: Mapping[str, Tensor]
    metadata: Metadata = Metadata()
    is_checkpoint: bool = False

    @property
    def dimensions(self) -> dict[str, Any] | None:
        """The model's dimensions; None where they are not known."""
        found = (self.metadata.config or {}).get("model")
        return found if isinstance(found, dict) else None


def open_source(path: Path, values: bool = True) -> Source:
    """Opens a file of torch.save or safetensors, a run's folder of checkpoints, or one checkpoint in it.

    With `values` a checkpoint's files are read, too, and checked. Raises CheckpointError for what cannot be read.
    """
    if not path.is_dir():
        if not path.is_file():
            raise CheckpointError(f"{path} is not there: name a file of weights or a folder of checkpoints")
        return Source(path, read_state_dict(path))
    path = resolve(path, None)[0]
    metadata = read_metadata(path)
    if values:
        return Source(path, read_full(path, metadata, metadata.tensors), metadata, True)
    tensors = {
        name: torch.empty(saved.shape, dtype=getattr(torch, saved.dtype), device="meta")
        for name, saved in metadata.tensors.items()
    }
    return Source(path, tensors, metadata, True)


def in_our_names(source: Source) -> Source:
    """The same tensors under our global names. Raises CheckpointError for names of no program known here."""
    if source.metadata.model or source.metadata.config is not None or model_of(None, source.tensors):
        return source
    return derived(source, dialect_of(source.tensors).to_ours(source.tensors))


def derived(source: Source, recipe: NameMap) -> Source:
    """Tensors made from those of another source. Raises CheckpointError where they do not fit together."""
    tensors = {
        name: made.of(source.tensors[each] for each in made.sources).contiguous() for name, made in recipe.items()
    }
    return replace(source, tensors=tensors)
