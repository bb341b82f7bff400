"""Megatron-LM's classic layout: one file of torch.save for each model-parallel rank.

    checkpoints/
        latest_checkpointed_iteration.txt
        iter_0000100/
            mp_rank_00_001/model_optim_rng.pt      tensor rank 0, pipeline rank 1; mp_rank_00 where there is one stage

A file holds `model`, this rank's parts of the tensors under our global names, and `optimizer`, the same for each kind
of state. What Megatron's own files leave to the code that reads them is in there as well: under `shards` how each
tensor is cut, under `checkpoint` what metadata.json says elsewhere.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
from pydantic import Field, with_config
from torch import Tensor

from megasnn.checkpoint import CheckpointError
from megasnn.checkpoint.description import GlobalName
from megasnn.checkpoint.folder import begin, discard, latest_of, name_latest, step_folder
from megasnn.checkpoint.optimizer_state import PREFIX
from megasnn.checkpoint.torch_archive import TorchArchive
from megasnn.convert.new_file import new_checkpoint, sync
from megasnn.convert.progress import byte_bar
from megasnn.convert.source import Facts, StoredBox, TensorInfo, TensorSource
from megasnn.convert.target import TargetRank
from megasnn.convert.torch_file import new_torch_file
from megasnn.files.described import STRICT, Count, DescriptionError, Shape, described_object
from megasnn.grid import Axis, Coordinates, Grid, Place
from megasnn.sharding import Cut, Shard

FILE = "model_optim_rng.pt"
VERSION = 3.0  # of Megatron's layout of a file
_MOST_RANKS = 1 << 20
_FOLDER = re.compile(r"mp_rank_(\d{2,})(?:_(\d{3,}))?")


def rank_folder(tensor: int, pipeline: int, stages: int) -> str:
    return f"mp_rank_{tensor:02d}" + (f"_{pipeline:03d}" if stages > 1 else "")


def is_classic(path: Path) -> bool:
    """Whether this is the folder of one checkpoint (`.../iter_0000100`) in the classic layout."""
    return any(True for _ in path.glob(f"mp_rank_*/{FILE}"))


def classic_folder(path: Path, step: int | None) -> Path | None:
    """The checkpoint of iteration `step`, or the latest, of a run's folder; None when there is no classic one."""
    step = latest_of(path) if step is None else step
    found = step_folder(path, step) if step is not None else path
    return found if is_classic(found) and (found is path or not found.is_symlink()) else None


@dataclass(frozen=True)
class _Part:
    """A rank's part of a tensor in its file."""

    archive: TorchArchive
    lazy: Tensor
    shard: Shard


@with_config(STRICT)
@dataclass(frozen=True)
class _Cut:
    """How a tensor is cut; see `megasnn.sharding.Shard`."""

    global_shape: Shape
    dim: Count | None
    blocks: Annotated[int, Field(ge=1, le=_MOST_RANKS)]
    rank: Count
    size: Annotated[int, Field(ge=1, le=_MOST_RANKS)]

    def as_shard(self) -> Shard:
        """Raises ValueError when it cannot be cut so."""
        if self.rank >= self.size or (self.dim is not None and self.dim >= len(self.global_shape)):
            raise ValueError(f"there is no rank {self.rank} of {self.size} for dimension {self.dim}")
        cuts: tuple[tuple[Axis, Cut], ...] = () if self.dim is None else (("tensor", Cut(self.dim, self.blocks)),)
        return Shard(self.global_shape, cuts, Place(Grid(tensor=self.size), Coordinates(tensor=self.rank)))


_Cuts: Any = dict[GlobalName, _Cut]


class ClassicSource(TensorSource):
    """A checkpoint of one file for each model-parallel rank, whose tensors are read when they are asked for.

    Args:
        path: of one checkpoint.
    Raises:
        CheckpointError: a rank's file is missing, cannot be read, or was not written here; parts do not fit together.
    """

    kind = "classic mp_rank files"

    def __init__(self, path: Path) -> None:
        self.path = path
        files = sorted(path.glob(f"mp_rank_*/{FILE}"))
        self.files = {str(file.relative_to(path)): file.stat().st_size for file in files}
        self._parts: dict[str, list[_Part]] = {}
        for file in files:
            if not file.resolve().is_relative_to(path.resolve()):
                raise CheckpointError(f"{file} is a link that leads out of {path}; put the file itself in its place")
            archive = TorchArchive(file)
            content = archive.content
            if not isinstance(content, Mapping) or not {"shards", "checkpoint", "model", "optimizer"} <= content.keys():
                raise CheckpointError(
                    f"{file} does not say how its tensors are cut (no 'shards'): tools/convert_checkpoint.py did not "
                    "write it"
                )
            try:
                self.facts = described_object(Facts, content["checkpoint"], f"{file}: checkpoint")
                cuts = described_object(_Cuts, content["shards"], f"{file}: shards")
                self._add(archive, content, cuts)
            except DescriptionError as error:
                raise CheckpointError(str(error)) from None
        self._require_all_ranks({file.parent.name for file in files})
        self.tensors = {name: self._describe(name, parts) for name, parts in sorted(self._parts.items())}

    def _add(self, archive: TorchArchive, content: Mapping[str, Any], cuts: Mapping[str, _Cut]) -> None:
        file = archive.path
        kinds = content["optimizer"]
        if not all(isinstance(values, Mapping) for values in (content["model"], kinds, *dict(kinds).values())):
            raise CheckpointError(f"{file}: model and optimizer should hold tensors by name")
        found = dict(content["model"])
        for kind, values in kinds.items():
            found |= {f"{PREFIX}{kind}.{name}": value for name, value in values.items()}
        if found.keys() != cuts.keys():
            raise CheckpointError(f"{file}: shards should name each of its tensors")
        for name, value in found.items():
            archive.require_sound(name, value)
            try:
                shard = cuts[name].as_shard()
            except ValueError as error:
                raise CheckpointError(f"{file}: shards.{name}: {error}") from None
            if tuple(value.shape) != shard.local_shape:
                raise CheckpointError(f"{file}: {name} has shape {list(value.shape)}, not {list(shard.local_shape)}")
            self._parts.setdefault(name, []).append(_Part(archive, value, shard))

    def _require_all_ranks(self, found: set[str]) -> None:
        layout = self.facts.layout or {}
        stages, size = layout.get("pipeline", 1), layout.get("tensor", 1)
        if type(stages) is not int or type(size) is not int or not 0 < stages * size < _MOST_RANKS:
            raise CheckpointError(f"{self.path}: checkpoint.layout: there cannot be {size!r} x {stages!r} ranks")
        needed = {rank_folder(rank, stage, stages) for stage in range(stages) for rank in range(size)}
        if missing := sorted(needed - found):
            raise CheckpointError(
                f"{self.path} was written for tensor {size} x pipeline {stages} ranks; missing: {', '.join(missing)}"
            )

    def _describe(self, name: str, parts: Sequence[_Part]) -> TensorInfo:
        shape = parts[0].shard.global_shape
        written = [part for part in parts if part.shard.is_primary()]
        elements = sum(part.lazy.numel() for part in written)
        if any(part.shard.global_shape != shape for part in parts) or elements != torch.Size(shape).numel():
            raise CheckpointError(f"{self.path}: the files hold {elements} elements of {name} {list(shape)}")
        boxes = tuple(
            StoredBox(str(part.archive.path.relative_to(self.path)), piece.global_offset, piece.sizes)
            for part in written
            for piece in part.shard.pieces()
        )
        return TensorInfo(shape, parts[0].lazy.dtype, boxes)

    def read(self, name: str) -> Tensor:
        info = self.tensors[name]
        value = torch.empty(info.shape, dtype=info.dtype)
        for part in self._parts[name]:
            if part.shard.is_primary():
                local = part.archive.read(name, part.lazy)
                for piece in part.shard.pieces():
                    piece.of_global(value).copy_(piece.of_local(local))
        return value


def write_classic(save: Path, facts: Facts, ranks: Sequence[TargetRank], source: TensorSource) -> Path:
    """Writes `<save>/iter_<iteration>` with a file for each rank, and names it in the `latest` file.

    Args:
        facts: kept in each file.
        ranks: their tensors, without memory, under their names in the source.
    Raises:
        CheckpointError: as `new_checkpoint`, or a tensor cannot be read.
    """
    with new_checkpoint(save, facts.iteration):
        return _write(save, facts, ranks, source)


def _write(save: Path, facts: Facts, ranks: Sequence[TargetRank], source: TensorSource) -> Path:
    final = step_folder(save, facts.iteration)
    aside = begin(save, facts.iteration)
    stages = 1 + max(rank.pipeline for rank in ranks)
    sizes = (TensorInfo(entry.shard.local_shape, entry.tensor.dtype) for rank in ranks for entry in rank.entries)
    try:
        with byte_bar("writing", sizes) as bar:
            for rank in ranks:
                file = aside / rank_folder(rank.tensor, rank.pipeline, stages) / FILE
                with new_torch_file(file, _content(facts, rank)) as filler:
                    for entry in rank.entries:
                        filler.put(_place(entry.name), source.read_shard(entry.name, entry.shard))
                        bar.update(TensorInfo(entry.shard.local_shape, entry.tensor.dtype).bytes)
        sync(aside)
        os.rename(aside, final)
    except BaseException:
        discard(save, facts.iteration)
        raise
    name_latest(save, facts.iteration)
    return final


def _place(name: str) -> tuple[str, ...]:
    """The keys in a file that lead to a tensor."""
    return ("optimizer", *name.removeprefix(PREFIX).split(".", 1)) if name.startswith(PREFIX) else ("model", name)


def _content(facts: Facts, rank: TargetRank) -> dict[str, Any]:
    content: dict[str, Any] = {
        "checkpoint_version": VERSION,
        "iteration": facts.iteration,
        "checkpoint": asdict(facts),
        "shards": {entry.name: asdict(_cut(entry.shard)) for entry in rank.entries},
        "model": {},
        "optimizer": {},
    }
    for entry in rank.entries:
        *keys, last = _place(entry.name)
        at = content
        for key in keys:
            at = at.setdefault(key, {})
        at[last] = TensorInfo(entry.shard.local_shape, entry.tensor.dtype)
    return content


def _cut(shard: Shard) -> _Cut:
    cut = dict(shard.cuts).get("tensor")
    dim, blocks = (cut.dim, cut.blocks) if cut else (None, 1)
    return _Cut(shard.global_shape, dim, blocks, shard.place.index("tensor"), shard.place.size("tensor"))
