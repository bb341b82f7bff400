"""A model's weights to other programs' files, and theirs to a checkpoint that a run can start from."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import torch

from megasnn.checkpoint.format import AVERAGE, BESIDE, Progress
from megasnn.checkpoint.save import new_metadata
from megasnn.checkpoint.tensor_io import boxes_of, require_intact, write_safetensors
from megasnn.convert.rank_files import write_rank_files
from megasnn.convert.source import Source, derived, in_our_names
from megasnn.files import CheckpointError, sync
from megasnn.models.registry import all_dialects, dialect_for, dialect_of, is_ours, model_of
from megasnn.models.weight_names import renamed
from megasnn.parallel.sharding import Shard, ShardedTensor

if TYPE_CHECKING:
    Names = str
else:  # so that the command line lists them
    Names = Literal[(*dict.fromkeys(dialect.name for dialect in all_dialects()), "megasnn")]
"""Program whose names tensors get: one that some model in the registry has names for, or ours."""


def weights_as(source: Source, names: Names, averaged: bool = False) -> Source:
    """The model's tensors, without the optimizer's, under another program's names.

    Args:
        averaged: their running average in their place.
    Raises:
        CheckpointError: the source is damaged or of no model that the program has, tensors are missing or unexpected,
            or there is no average of them.
    """
    if source.is_checkpoint:  # files of other programs have no checksums of ours
        require_intact(source.path, source.metadata)
    ours = in_our_names(source)
    if averaged:
        of_averages = {name.removeprefix(AVERAGE): name for name in ours.tensors if name.startswith(AVERAGE)}
        if not of_averages:
            raise CheckpointError(f"{ours.path} holds no average of the weights: the run had no --ema-decay")
        ours = derived(ours, renamed(of_averages))
    weights = [name for name in ours.tensors if not name.startswith(BESIDE)]
    if names == "megasnn":
        return derived(ours, renamed({name: name for name in weights}))
    return derived(ours, dialect_for(names, weights, ours.metadata.model).from_ours(weights, ours.dimensions))


def export_weights(source: Source, output: Path, names: Names, averaged: bool = False) -> Source:
    """Writes the model's tensors, or their averages, to a new file. Returns what was written.

    Args:
        output: safetensors where its name ends so, one tensor at a time; otherwise a state_dict of torch.save, for
            programs that read nothing else.
    Raises:
        CheckpointError: as `weights_as`, or there is such a file already.
    """
    weights = weights_as(source, names, averaged)
    if output.exists():
        raise CheckpointError(f"{output} exists already; remove it or give another --output")
    output.parent.mkdir(parents=True, exist_ok=True)
    aside = output.with_name(f"{output.name}.tmp")
    try:
        if output.suffix == ".safetensors":
            boxes = [box for box, _, _ in boxes_of(_full_entries(weights))]
            write_safetensors(aside, boxes, (weights.read(box.tensor) for box in boxes))
        else:
            torch.save({name: weights.read(name).clone() for name in weights.tensors}, aside)
            sync(aside)
        os.rename(aside, output)
        sync(output.parent)
    finally:
        aside.unlink(missing_ok=True)
    return weights


def import_weights(source: Source, save: Path) -> tuple[Path, str]:
    """Writes weights as a checkpoint of iteration 0 without optimizer state and configuration, for --finetune.

    Returns:
        the checkpoint, and the program whose names the weights had.
    Raises:
        CheckpointError: they are of no model and program known here, or there is such a checkpoint already.
    """
    title = "MegaSNN" if is_ours(source.tensors) else dialect_of(source.tensors).title
    weights = weights_as(source, "megasnn")
    model = model_of(source.metadata.model, weights.tensors)
    progress = Progress(model=None if model is None else model.name, extra={"source": source.path.name})
    metadata = new_metadata(progress, None)
    return write_rank_files(save, metadata, [_full_entries(weights)], lambda entry: weights.read(entry.name)), title


def _full_entries(source: Source) -> list[ShardedTensor]:
    """All tensors as one rank has them, without memory."""
    return [ShardedTensor(name, value, Shard(tuple(value.shape)), False) for name, value in source.tensors.items()]
