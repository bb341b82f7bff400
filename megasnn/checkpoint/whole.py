"""Whole tensors: of checkpoints in one process, for tools and tests; from elsewhere into a model of which every rank
holds a part; and the check of every byte of a checkpoint."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megasnn.checkpoint.description import BESIDE, read_metadata
from megasnn.checkpoint.files import PieceReader
from megasnn.checkpoint.folder import reading
from megasnn.checkpoint.loading import first_intact, read_tensors
from megasnn.checkpoint.pieces import DCP_METADATA, PIECES, by_file, file_checksum_of, read_pieces
from megasnn.checkpoint.saving import PathLike, save_checkpoint
from megasnn.comm.agreement import gather
from megasnn.files.problems import raise_problems
from megasnn.sharded_tensors import ShardedTensor
from megasnn.sharding import Shard


def load_global_tensors(
    folder: PathLike, step: int | None = None, *, prefix: str = "", with_optimizer: bool = False
) -> dict[str, Tensor]:
    """Whole tensors of a checkpoint by global name, on the CPU, in one process.

    Warns when it is not the latest that they are of, because that one is damaged.

    Args:
        prefix: only names that start so.
        with_optimizer: the optimizer's state and the average of the weights too.

    Raises:
        CheckpointError: as `load_checkpoint`.
    """

    def load(path: Path) -> dict[str, Tensor]:
        metadata = read_metadata(path)
        saved = read_pieces(path, metadata)
        tensors = {
            name: torch.empty(saved[name].shape, dtype=saved[name].torch_dtype)
            for name in metadata.tensors
            if name.startswith(prefix) and (with_optimizer or not name.startswith(BESIDE))
        }
        read_tensors(path, saved, _whole(tensors), None)
        return tensors

    tensors, remarks = first_intact(folder, step, None, load)
    for remark in remarks:
        warnings.warn(remark, stacklevel=2)
    return tensors


def save_global_tensors(
    folder: PathLike,
    tensors: Mapping[str, Tensor],
    *,
    iteration: int = 0,
    model: str | None = None,
    config: dict[str, Any] | None = None,
    extra: dict[str, Any] | None = None,
) -> Path:
    """Writes whole tensors, in one process, as a checkpoint of weights only; load it with --finetune."""
    return save_checkpoint(
        folder,
        iteration=iteration,
        consumed_samples=0,
        tensors=_whole(tensors),
        optimizer=None,
        extra=extra or {},
        config=config,
        layout=None,
        model=model,
    )


def _whole(tensors: Mapping[str, Tensor]) -> list[ShardedTensor]:
    return [ShardedTensor(name, value, Shard(tuple(value.shape)), False) for name, value in tensors.items()]


def verify_checkpoint(path: Path) -> Iterator[tuple[int, str | None]]:
    """Reads every byte of one checkpoint (`.../iter_0000100`) and checks it.

    Yields:
        for each piece of a file the number of its bytes, and what is wrong with it, or None.
    Raises:
        CheckpointError: what describes the files is damaged itself, or a file is missing or of another size.
    """
    with reading(path):
        metadata = read_metadata(path)
        reader, files = PieceReader(path), by_file(read_pieces(path, metadata).values())
        for name in sorted(metadata.files.keys() - {DCP_METADATA, PIECES}):
            pieces = files.get(name, [])
            yield from reader.damage(name, pieces)
            if f"{file_checksum_of(piece for piece, _ in pieces):08x}" != metadata.files[name].crc32:
                yield 0, f"{path / name}: metadata.json and what describes its pieces tell different checksums"


def load_globals_into(
    tensors: Iterable[ShardedTensor],
    values: Mapping[str, Tensor],
    process_group: dist.ProcessGroup | None = None,
) -> None:
    """Copies this rank's part of every global tensor into the model, converted to the model's dtype.

    Collective over `process_group`, the group of all ranks (None for a process on its own): together they
    must take exactly the tensors given.

    Raises:
        CheckpointError: on every rank, before anything is changed: a tensor is missing, one is taken by
            no rank, or a shape differs.
    """
    entries = list(tensors)
    reports = gather(process_group, ([entry.name for entry in entries], list(_mismatches(entries, values))))
    unexpected = set(values) - {name for names, _ in reports for name in names}
    problems = [problem for _, found in reports for problem in found]
    problems += [f"{name}: given, but this model has no such tensor" for name in unexpected]
    raise_problems("these weights are not this model's:", problems)
    with torch.no_grad():
        for entry in entries:
            for piece in entry.shard.pieces():
                piece.of_local(entry.tensor).copy_(piece.of_global(values[entry.name]))


def _mismatches(entries: Iterable[ShardedTensor], values: Mapping[str, Tensor]) -> Iterable[str]:
    for entry in entries:
        value = values.get(entry.name)
        if value is None:
            yield f"{entry.name}: missing"
        elif not isinstance(value, Tensor):
            yield f"{entry.name}: is a {type(value).__name__}, not a tensor"
        elif entry.tensor.is_floating_point() and not value.is_floating_point():
            yield f"{entry.name}: has values of {value.dtype}, this model needs {entry.tensor.dtype}"
        elif tuple(value.shape) != entry.shard.global_shape:
            needed = list(entry.shard.global_shape)
            yield f"{entry.name}: has shape {list(value.shape)}, this model needs {needed}"
