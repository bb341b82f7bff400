"""A checkpoint as the ranks of another grid would write it, from one process that holds one tensor at a time."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from torch import Tensor
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import WriteItem
from tqdm import tqdm

from megasnn.checkpoint import CheckpointError
from megasnn.checkpoint import folder as folders
from megasnn.checkpoint.files import PieceWriter
from megasnn.checkpoint.pieces import SavedTensor
from megasnn.checkpoint.planner import PieceSavePlanner, boxes_of, copy_name
from megasnn.checkpoint.saving import Progress, describe_written
from megasnn.convert.new_file import new_checkpoint
from megasnn.convert.opening import in_our_names
from megasnn.convert.source import TensorSource
from megasnn.convert.target import LaidOut, Target, lay_out, saved_model
from megasnn.sharding import Shard, ShardedTensor
from megasnn.telemetry.progress import byte_bar


class _LazyPlanner(PieceSavePlanner):
    """Plans with tensors that have no memory, and reads what they stand for when it is due to be written.

    Args:
        entries: what one rank writes.
        names: what all ranks together write.
        source_name: of a tensor that is a copy of another, the other's name.
    """

    def __init__(
        self,
        entries: Sequence[ShardedTensor],
        names: Collection[str],
        source_name: Mapping[str, str],
        source: TensorSource,
        bar: tqdm,
    ) -> None:
        super().__init__(entries, names)
        self._entries = {entry.name: entry for entry in entries}
        self._source_name, self._source, self._bar = source_name, source, bar
        self._held: dict[MetadataIndex, Tensor] = {}

    def resolve_data(self, write_item: WriteItem) -> Tensor:
        if write_item.index not in self._held:
            self._held = {}  # let go of the last tensor before the next one is read
            entry = self._entries[write_item.index.fqn]
            value = self._source.read_shard(self._source_name.get(entry.name, entry.name), entry.shard)
            self._held = {index: view for index, _, view in boxes_of(replace(entry, tensor=value))}
        view = self._held[write_item.index]
        self._bar.update(view.nbytes)
        return view


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
            with byte_bar("writing", sum(entry.tensor.nbytes for rank in written for entry in rank)) as bar:
                planners = [_LazyPlanner(entries, names, copied, source, bar) for entries in written]
                tensors_written = _write(PieceWriter(aside), planners)
            return folders.commit(save, describe_written(progress, optimizer, aside, tensors_written))
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


def _write(writer: PieceWriter, planners: Sequence[_LazyPlanner]) -> Sequence[SavedTensor]:
    """What torch.distributed.checkpoint.save does on all ranks, one rank after the other."""
    writer.set_up_storage_writer(True)
    plans = [writer.prepare_local_plan(planner.create_local_plan()) for planner in planners]
    plans, metadata = planners[0].create_global_plan(plans)
    plans = writer.prepare_global_plan(plans)
    results = [writer.write_data(plan, planner).wait() for plan, planner in zip(plans, planners, strict=True)]
    writer.finish(metadata, results)
    return writer.tensors


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
