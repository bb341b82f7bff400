"""Laying out a checkpoint for the ranks of another grid."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from megasnn.checkpoint import CheckpointError
from megasnn.checkpoint.saving import Progress
from megasnn.convert.layout import LaidOut, Target, lay_out
from megasnn.convert.model import saved_model
from megasnn.convert.opening import in_our_names
from megasnn.convert.rank_files import write_rank_files
from megasnn.convert.source import TensorSource


def reshard(source: TensorSource, save: Path, target: Target) -> tuple[Path, LaidOut]:
    """Writes the source's checkpoint to `<save>/iter_<iteration>` with a file for each rank of the target.

    Iteration, place in the data and optimizer state stay: a run goes on from it as from the source.

    Returns:
        the new checkpoint, and what each rank holds of it.
    Raises:
        CheckpointError: the source is of no model known here, the model cannot be cut like this, there is a
            checkpoint of this iteration in `save`, or the source is damaged.
    """
    source = in_our_names(source)
    facts = source.facts
    if save.resolve() in (source.path.resolve(), source.path.resolve().parent):
        raise CheckpointError(f"--save {save} is where the checkpoint is read from; give another folder")
    model = saved_model(source)
    laid_out = lay_out(target, model, facts, source.tensors)
    facts = replace(facts, layout=laid_out.layout, model=model.name)
    progress = Progress(facts.iteration, facts.consumed_samples, facts.extra, facts.config, facts.layout, facts.model)
    path = write_rank_files(save, progress, facts.optimizer, [rank.entries for rank in laid_out.ranks], source)
    return path, laid_out
