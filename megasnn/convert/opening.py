"""Opening whatever a path leads to."""

from __future__ import annotations

from pathlib import Path

from megasnn.checkpoint import CheckpointError, find_checkpoint
from megasnn.checkpoint.description import METADATA
from megasnn.convert.checkpoint import CheckpointSource
from megasnn.convert.safetensors_file import SafetensorsSource
from megasnn.convert.source import DerivedSource, TensorSource
from megasnn.convert.torch_file import TorchFileSource
from megasnn.models.dialects import dialect_of, is_ours

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
