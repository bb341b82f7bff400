"""A checkpoint as the ranks of another grid would write it, from one process that holds one tensor at a time."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from tqdm import tqdm

from megasnn.checkpoint import CheckpointError
from megasnn.checkpoint import folder as folders
from megasnn.checkpoint.complete import complete, file_name
from megasnn.checkpoint.piece_file import write_pieces_file
from megasnn.checkpoint.planner import content_of, copy_name, parts_of, pieces_in_memory, pieces_of
from megasnn.checkpoint.saving import Progress, described
from megasnn.convert.new_file import new_checkpoint
from megasnn.convert.opening import in_our_names
from megasnn.convert.source import TensorSource
from megasnn.convert.target import LaidOut, Target, lay_out, saved_model
from megasnn.sharded_tensors import ShardedTensor
from megasnn.sharding import Shard
from megasnn.telemetry.log import byte_bar


def write_rank_files(
    save: Path,
    progress: Progress,
    optimizer: str | None,
    ranks: Sequence[Sequence[ShardedTensor]],
    source: TensorSource,
) -> Path:
    """Writes the checkpoint `<save>/iter_<iteration>` with a file for each rank, and makes it the latest.

    A rank's file also holds copies of the whole tensors that another rank of its tensor-parallel group answers for.

    Args:
        optimizer: class name of the one whose state is among the tensors.
        ranks: each rank's tensors, without memory, under their names in the source.
    Raises:
        CheckpointError: as `new_checkpoint`, or a tensor cannot be read.
        OSError: writing fails; nothing is left behind then.
    """
    copied: dict[str, str] = {}
    written = [[_with_copies(entry, copied) for entry in entries] for entries in ranks]
    names = {entry.name for entries in written for entry in entries}
    with new_checkpoint(save, progress.iteration):
        aside = folders.begin(save, progress.iteration)
        try:
            content = content_of([pieces_of(entries, rank) for rank, entries in enumerate(written)], names)
            with byte_bar("writing", sum(entry.tensor.nbytes for rank in written for entry in rank)) as bar:
                checksums = [
                    write_pieces_file(aside / file_name(rank), _read(entries, copied, source, bar)) if entries else []
                    for rank, entries in enumerate(written)
                ]
            return complete(save, described(progress, optimizer), content, checksums)
        except BaseException:
            folders.discard(save, progress.iteration)
            raise


def _with_copies(entry: ShardedTensor, copied: dict[str, str]) -> ShardedTensor:
    """The entry itself where its rank answers for it; otherwise a tensor of its own that is noted in `copied`."""
    if entry.shard.is_primary():
        return entry
    name = copy_name(entry)
    copied[name] = entry.name
    return replace(entry, name=name, shard=Shard(entry.shard.global_shape))


def _read(
    entries: Iterable[ShardedTensor], source_name: Mapping[str, str], source: TensorSource, bar: tqdm
) -> Iterator[list[memoryview]]:
    """The pieces of tensors without memory; each tensor is read when it is due to be written.

    Args:
        source_name: of a tensor that is a copy of another, the other's name.
    """
    for entry in entries:
        value = source.read_shard(source_name.get(entry.name, entry.name), entry.shard)
        for view in pieces_in_memory(replace(entry, tensor=value)):
            yield parts_of(view)
            bar.update(view.nbytes)


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
    path = write_rank_files(save, facts, facts.optimizer, [rank.entries for rank in laid_out.ranks], source)
    return path, laid_out
