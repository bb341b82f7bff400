"""A model's weights to other programs' files, and theirs to a checkpoint that a run can start from."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import torch
from safetensors.torch import save_file

from megasnn.checkpoint.folder import require_empty
from megasnn.checkpoint.format import AVERAGE, BESIDE
from megasnn.checkpoint.save import save_global_tensors
from megasnn.convert.source import Source, derived, in_our_names
from megasnn.files import CheckpointError, sync
from megasnn.models.registry import all_dialects, dialect_for, dialect_of, model_of
from megasnn.models.weight_names import renamed

if TYPE_CHECKING:
    Names = str
else:  # so that the command line lists them
    Names = Literal[(*dict.fromkeys(dialect.name for dialect in all_dialects()), "megasnn")]
"""Program whose names tensors get: one that some model in the registry has names for, or ours."""


def weights_as(source: Source, names: Names, averaged: bool = False) -> Source:
    """The model's tensors, without the optimizer's, under another program's names.

    With `averaged`, their running average in their place. Raises CheckpointError where the source is of no model that
    the program has, tensors are missing or unexpected, or there is no average of them.
    """
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
    """Writes the model's tensors, or their averages, to a new file, and returns them: safetensors where its name ends
    so; otherwise a state_dict of torch.save, for programs that read nothing else.

    Raises CheckpointError as `weights_as`, and where there is such a file already.
    """
    weights = weights_as(source, names, averaged)
    if output.exists():
        raise CheckpointError(f"{output} exists already; remove it or give another --output")
    output.parent.mkdir(parents=True, exist_ok=True)
    aside = output.with_name(f"{output.name}.tmp")
    tensors = {name: value.clone() for name, value in weights.tensors.items()}
    try:
        if output.suffix == ".safetensors":
            save_file(tensors, aside, {"format": "pt"})
        else:
            torch.save(tensors, aside)
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
        CheckpointError: they are of no model and program known here, or `save` holds checkpoints already.
    """
    require_empty(save)
    title = "MegaSNN" if model_of(None, source.tensors) else dialect_of(source.tensors).title
    weights = weights_as(source, "megasnn")
    model, extra = model_of(source.metadata.model, weights.tensors), {"source": source.path.name}
    name = None if model is None else model.name
    return save_global_tensors(save, weights.tensors, model=name, extra=extra), title
