"""A checkpoint or a weight file as tensors by name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from megasnn.checkpoint.folder import checkpoints_to_try
from megasnn.checkpoint.format import Metadata, read_metadata
from megasnn.checkpoint.tensor_io import allocated, read_full
from megasnn.checkpoint.weight_file import read_weights
from megasnn.common.files import CheckpointError
from megasnn.models.registry import dialect_of, model_of
from megasnn.models.weight_names import NameMap


@dataclass(frozen=True)
class Source:
    """Tensors by name.

    Attributes:
        tensors: complete, on the CPU; on the meta device for a checkpoint opened without values.
        metadata: empty for a file.
    """

    path: Path
    tensors: Mapping[str, Tensor]
    metadata: Metadata = Metadata()
    is_checkpoint: bool = False
    notices: tuple[str, ...] = ()

    @property
    def model_values(self) -> dict[str, Any] | None:
        """Dimensions of the model and values of its neuron, by name; None if unknown."""
        config: dict[str, Any] = self.metadata.config or {}
        if not isinstance(config.get("model"), dict):
            return None
        neuron = config.get("neuron")
        return (neuron if isinstance(neuron, dict) else {}) | config["model"]


def open_source(path: Path, values: bool = True, ema: bool = True) -> Source:
    """Opens a weight file, a run's checkpoint folder, or one checkpoint.

    Args:
        values: read and check a checkpoint's files as well.
        ema: of a file take the average of the weights, if it has one.
    Raises:
        CheckpointError: it is missing or cannot be read.
    """
    if not path.is_dir():
        if not path.is_file():
            raise CheckpointError(f"{path} is not there: name a file of weights or a folder of checkpoints")
        file = read_weights(path, ema)
        return Source(path, file.tensors, notices=file.notices)
    # The latest alone: a tool must not pass over a damaged checkpoint, as a run does.
    path = checkpoints_to_try(path, None)[0]
    metadata = read_metadata(path)
    if values:
        return Source(path, read_full(path, metadata, metadata.tensors), metadata, True)
    tensors = {name: allocated(saved, "meta") for name, saved in metadata.tensors.items()}
    return Source(path, tensors, metadata, True)


def in_our_names(source: Source) -> Source:
    """The tensors under MegaSNN's names. Raises CheckpointError if no known program uses theirs.

    A file with a tied tensor and its copy becomes the tied model's tensors.
    """
    if source.metadata.model or source.metadata.config is not None or model_of(None, source.tensors):
        return source
    dialect = dialect_of(source.tensors)
    ours = derived(source, dialect.to_ours(source.tensors))
    return replace(ours, tensors=dialect.without_copies(ours.tensors))


def derived(source: Source, recipe: NameMap) -> Source:
    """Tensors made by a recipe. Raises CheckpointError if they do not fit together."""
    tensors = {}
    for name, made in recipe.items():
        parts = [source.tensors[part] for part in made.sources]
        tensors[name] = made.of(parts).contiguous()
    return replace(source, tensors=tensors)
