"""A checkpoint as the ranks of some grid would write it, from one process that holds one tensor at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from torch import Tensor

from megasnn.checkpoint import folder as folders
from megasnn.checkpoint.format import Metadata
from megasnn.checkpoint.job import FolderLock
from megasnn.checkpoint.save import Written, commit, file_name
from megasnn.checkpoint.tensor_io import boxes_of, write_safetensors
from megasnn.files import CheckpointError
from megasnn.parallel.sharding import ShardedTensor
from megasnn.telemetry.log import byte_bar


def write_rank_files(
    save: Path,
    metadata: Metadata,
    ranks: Sequence[Sequence[ShardedTensor]],
    read: Callable[[ShardedTensor], Tensor],
) -> Path:
    """Writes the checkpoint `<save>/iter_<iteration>` with a file for each rank, and makes it the latest.

    A rank's file also holds copies of the tensors that another rank of its tensor-parallel group answers for.

    Args:
        metadata: without tensors and files.
        ranks: each rank's tensors, without memory.
        read: gives a rank's part of a tensor; asked when it is due to be written.
    Raises:
        CheckpointError: there is a checkpoint of this iteration already, or a later one, of which this one would take
            the place as the latest; a run saves there; or a tensor cannot be read.
        OSError: writing fails; nothing is left behind then.
    """
    step = metadata.iteration
    if folders.step_folder(save, step).exists():
        raise CheckpointError(f"{folders.step_folder(save, step)} exists already; remove it or give another --save")
    if (latest := folders.named(save, folders.LATEST)) is not None and latest > step:
        raise CheckpointError(
            f"{save} holds a run that has come to iteration {latest}; one of iteration {step} would become its latest: "
            "give another --save"
        )
    lock = FolderLock(save)
    try:
        aside = folders.begin(save, step)
        with byte_bar("writing", sum(entry.tensor.nbytes for rank in ranks for entry in rank)) as bar:
            written = [
                _write_rank(aside / file_name(rank), entries, read, bar.update) for rank, entries in enumerate(ranks)
            ]
        return commit(save, metadata, written)
    except BaseException:
        folders.discard(save, step)
        raise
    finally:
        lock.release()


def _write_rank(
    path: Path,
    entries: Sequence[ShardedTensor],
    read: Callable[[ShardedTensor], Tensor],
    progress: Callable[[int], object],
) -> Written:
    boxes = boxes_of(entries)

    def values() -> Iterator[Tensor]:
        name, local = "", None
        for _, entry, piece in boxes:
            if local is None or entry.name != name:
                local = None  # one tensor at a time
                name, local = entry.name, read(entry)
                progress(local.nbytes)
            yield piece.of_local(local)

    facts = write_safetensors(path, [box for box, _, _ in boxes], values())
    own = [box for box, entry, _ in boxes if entry.shard.is_primary()]
    copies = [box for box, entry, _ in boxes if not entry.shard.is_primary()]
    return Written(path.name, facts, own, copies)
