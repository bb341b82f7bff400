"""A model's weights to other programs' files, and theirs to a checkpoint that a run can start from."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Literal

from megasnn.checkpoint.description import AVERAGE, BESIDE
from megasnn.checkpoint.saving import Progress
from megasnn.convert.opening import in_our_names
from megasnn.convert.rank_files import write_rank_files
from megasnn.convert.safetensors_file import new_safetensors_file
from megasnn.convert.source import DerivedSource, TensorSource
from megasnn.convert.target import without_memory
from megasnn.convert.torch_file import new_torch_file
from megasnn.files.problems import CheckpointError
from megasnn.models.dialects import all_dialects, dialect_for, dialect_of, is_ours, model_of
from megasnn.models.names import renamed
from megasnn.sharding import Shard
from megasnn.telemetry.log import byte_bar

if TYPE_CHECKING:
    Names = str
else:  # so that the command line lists them
    Names = Literal[(*dict.fromkeys(dialect.name for dialect in all_dialects()), "megasnn")]
"""Whose names tensors get: those of a program that some model in the table has names for, or ours."""


def weights_as(source: TensorSource, names: Names, averaged: bool = False) -> TensorSource:
    """The model's tensors, without the optimizer's, under another program's names.

    Args:
        averaged: their running average in their place.
    Raises:
        CheckpointError: the source is of no model that the program has, tensors are missing or unexpected, or there is
            no average of them.
    """
    ours = _averages(in_our_names(source)) if averaged else in_our_names(source)
    weights = [name for name in ours.tensors if not name.startswith(BESIDE)]
    if names == "megasnn":
        return DerivedSource(ours, renamed({name: name for name in weights}))
    dialect = dialect_for(names, weights, ours.facts.model)
    return DerivedSource(ours, dialect.from_ours(weights, ours.facts.dimensions))


def _averages(ours: TensorSource) -> TensorSource:
    """The running averages under the names of the tensors that they are of."""
    names = {name.removeprefix(AVERAGE): name for name in ours.tensors if name.startswith(AVERAGE)}
    if not names:
        raise CheckpointError(f"{ours.path} holds no average of the weights: the run had no --ema-decay")
    return DerivedSource(ours, renamed(names))


def export_weights(
    source: TensorSource, output: Path, names: Names, safetensors: bool, averaged: bool = False
) -> TensorSource:
    """Writes the model's tensors, or their averages, to a new file; what was written.

    Raises:
        CheckpointError: as `weights_as`, or there is such a file already.
    """
    weights = weights_as(source, names, averaged)
    tensors = weights.tensors
    told = {"format": "pt", "names": names, "iteration": str(weights.facts.iteration)}
    file = new_safetensors_file(output, tensors, told) if safetensors else new_torch_file(output, tensors)
    with byte_bar("writing", sum(info.bytes for info in tensors.values())) as bar, file as put:
        for name, info in tensors.items():
            put(name, weights.read(name))
            bar.update(info.bytes)
    return weights


def import_weights(source: TensorSource, save: Path) -> tuple[Path, str]:
    """Writes weights as a checkpoint of iteration 0 without optimizer state and configuration, for --finetune.

    Returns:
        the checkpoint, and whose names the weights had.
    Raises:
        CheckpointError: they are of no model and program known here, or there is such a checkpoint already.
    """
    title = "MegaSNN" if is_ours(source.tensors) else dialect_of(source.tensors).title
    weights = weights_as(source, "megasnn")
    entries = [without_memory(name, Shard(info.shape), info) for name, info in weights.tensors.items()]
    entry = model_of(source.facts.model, weights.tensors)
    model = None if entry is None else entry.name
    progress = Progress(0, 0, {"source": str(source.path)}, None, None, model)
    return write_rank_files(save, progress, None, [entries], weights), title
