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
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megasnn.checkpoint import CheckpointError
from megasnn.checkpoint.folder import LATEST, latest_of, step_folder
from megasnn.checkpoint.optimizer_state import PREFIX
from megasnn.convert.new_file import new_checkpoint, sync
from megasnn.convert.progress import byte_bar
from megasnn.convert.source import Facts, StoredBox, TensorInfo, TensorSource
from megasnn.convert.target import TargetRank
from megasnn.convert.torch_file import load_lazily, new_torch_file, read_lazy, require_checksums
from megasnn.sharding import Shard, ShardedTensor

FILE = "model_optim_rng.pt"
VERSION = 3.0  # of Megatron's layout of a file
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
    return found if is_classic(found) else None


@dataclass(frozen=True)
class _Part:
    """A rank's part of a tensor in its file."""

    file: Path
    lazy: Tensor
    shard: Shard


class ClassicSource(TensorSource):
    """
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
            require_checksums(file)
            content = load_lazily(file)
            if not isinstance(content, Mapping) or "shards" not in content or "checkpoint" not in content:
                raise CheckpointError(
                    f"{file} does not say how its tensors are cut (no 'shards'): tools/convert_checkpoint.py did not "
                    "write it"
                )
            self.facts = Facts(**content["checkpoint"])
            self._add(file, content)
        self._require_all_ranks({file.parent.name for file in files})
        self.tensors = {name: self._describe(name, parts) for name, parts in sorted(self._parts.items())}

    def _add(self, file: Path, content: Mapping[str, Any]) -> None:
        found = dict(content["model"])
        for kind, values in content["optimizer"].items():
            found |= {f"{PREFIX}{kind}.{name}": value for name, value in values.items()}
        for name, value in found.items():
            told = content["shards"][name]
            shard = Shard(tuple(told["global_shape"]), told["dim"], told["blocks"], told["rank"], told["size"])
            if tuple(value.shape) != shard.local_shape:
                raise CheckpointError(f"{file}: {name} has shape {list(value.shape)}, not {list(shard.local_shape)}")
            self._parts.setdefault(name, []).append(_Part(file, value, shard))

    def _require_all_ranks(self, found: set[str]) -> None:
        layout = self.facts.layout or {}
        stages, size = layout.get("pipeline", 1), layout.get("tensor", 1)
        needed = {rank_folder(rank, stage, stages) for stage in range(stages) for rank in range(size)}
        if missing := sorted(needed - found):
            raise CheckpointError(
                f"{self.path} was written for tensor {size} x pipeline {stages} ranks; missing: {', '.join(missing)}"
            )

    def _describe(self, name: str, parts: Sequence[_Part]) -> TensorInfo:
        shape = parts[0].shard.global_shape
        written = [part for part in parts if part.shard.is_primary]
        elements = sum(part.lazy.numel() for part in written)
        if any(part.shard.global_shape != shape for part in parts) or elements != torch.Size(shape).numel():
            raise CheckpointError(f"{self.path}: the files hold {elements} elements of {name} {list(shape)}")
        boxes = tuple(
            StoredBox(str(part.file.relative_to(self.path)), piece.global_offset, piece.sizes)
            for part in written
            for piece in part.shard.pieces()
        )
        return TensorInfo(shape, parts[0].lazy.dtype, boxes)

    def read(self, name: str) -> Tensor:
        info = self.tensors[name]
        value = torch.empty(info.shape, dtype=info.dtype)
        for part in self._parts[name]:
            if part.shard.is_primary:
                local = read_lazy(part.file, part.lazy)
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
    aside = final.with_name(f"{final.name}.tmp")
    shutil.rmtree(aside, ignore_errors=True)
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
        shutil.rmtree(aside, ignore_errors=True)
        raise
    latest = save / f"{LATEST}.tmp"
    latest.write_text(f"{facts.iteration}\n")
    sync(latest)
    os.replace(latest, save / LATEST)
    sync(save)
    return final


def _place(name: str) -> tuple[str, ...]:
    """The keys in a file that lead to a tensor."""
    return ("optimizer", *name.removeprefix(PREFIX).split(".", 1)) if name.startswith(PREFIX) else ("model", name)


def _content(facts: Facts, rank: TargetRank) -> dict[str, Any]:
    content: dict[str, Any] = {
        "checkpoint_version": VERSION,
        "iteration": facts.iteration,
        "checkpoint": asdict(facts),
        "shards": {entry.name: _cut(entry) for entry in rank.entries},
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


def _cut(entry: ShardedTensor) -> dict[str, Any]:
    shard = entry.shard
    return {
        "global_shape": list(shard.global_shape),
        "dim": shard.dim,
        "blocks": shard.blocks,
        "rank": shard.rank,
        "size": shard.size,
    }
