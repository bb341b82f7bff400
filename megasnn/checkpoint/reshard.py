"""Rewrites a checkpoint for another grid, so that each rank reads one file. The model is not built."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from megasnn.checkpoint import folder as folders
from megasnn.checkpoint.format import AVERAGE, OPTIMIZER
from megasnn.checkpoint.optimizer_state import state_names
from megasnn.checkpoint.save import Written, commit_checkpoint, file_name, write_file
from megasnn.checkpoint.source import Source
from megasnn.checkpoint.tensor_io import boxes_of, read_boxes, require_intact
from megasnn.common.files import CheckpointError, raise_problems
from megasnn.common.grid import Grid
from megasnn.layers import BuildContext
from megasnn.layers.tensors import sharded_tensors
from megasnn.models import registry
from megasnn.models.description import ModelDescription
from megasnn.models.registry import MODELS, model_of
from megasnn.parallel.sharding import Shard, ShardedTensor
from megasnn.parallel_state import ParallelState
from megasnn.schedule.partition import PLACEMENTS, layout_to_bounds, parse_layout, placed_bounds


@dataclass(frozen=True)
class Target:
    """Grid that will load the checkpoint.

    Attributes:
        layout: layer groups or layers in each chunk, as for `--pipeline-model-parallel-layout`. None: the checkpoint's
            layout, or chunks with even operations if their number has changed.
        shape: name in PLACEMENTS.
    """

    tensor: int = 1
    pipeline: int = 1
    virtual: int = 1
    layout: str | None = None
    shape: str = "loop"

    @property
    def placement(self) -> tuple[int, ...]:
        """Each chunk's pipeline rank. Raises ValueError for an impossible number of chunks."""
        sizes = (self.tensor, self.pipeline, self.virtual)
        if min(sizes) < 1:
            raise ValueError(f"every size of the target must be at least 1, got {sizes}")
        return PLACEMENTS[self.shape](self.pipeline, self.virtual)

    def bounds(self, description: ModelDescription, saved_layout: str) -> list[range]:
        """Each chunk's layers. Raises ValueError for a layout that does not fit, or more chunks than layers.

        Args:
            saved_layout: the checkpoint's layout, as layers in each chunk.
        """
        layers = description.layers
        chunks = len(self.placement)
        if self.layout is not None:
            return layout_to_bounds(parse_layout(self.layout), [layer.layer_group for layer in layers], chunks)
        if saved_layout.count("|") + 1 != chunks:
            return placed_bounds([layer.operations for layer in layers], self.placement)
        layout = saved_layout or str(len(layers))
        return layout_to_bounds(parse_layout(layout), description.layer_names, chunks)


def reshard(source: Source, save: Path, target: Target) -> tuple[Path, str]:
    """Writes `<save>/iter_<iteration>` with a file for each target rank.

    A run continues as from the source. Each file holds all its rank's tensors, with those replicated over the tensor
    parallel group.

    Args:
        source: opened without values.
    Returns:
        the new checkpoint, and its layers per chunk for `--pipeline-model-parallel-layout`.
    Raises:
        CheckpointError: the model is unknown, the source is damaged, or `save` holds checkpoints already.
        ValueError: the model cannot be cut like this. No files stay then, nor when writing fails.
    """
    folders.require_empty(save)
    before = source.metadata
    name, description = model_of_checkpoint(source)
    bounds = target.bounds(description, str((before.layout or {}).get("bounds", "")))
    ranks = target_ranks(description, source.tensors, target, bounds)
    # After the fit, which needs no values: checksums read every byte.
    require_intact(source.path, before)
    layout = "|".join(str(len(span)) for span in bounds)
    sizes = {"tp": target.tensor, "pp": target.pipeline, "dp": 1, "virtual": target.virtual}
    metadata = replace(before, model=name, layout={**sizes, "bounds": layout}, tensors={}, files={})
    aside = folders.begin(save, before.iteration)
    written = list[Written]()
    try:
        for rank, entries in enumerate(ranks):
            # One rank's values are in memory at a time.
            filled = [replace(entry, tensor=torch.empty_like(entry.tensor, device="cpu")) for entry in entries]
            read_boxes(source.path, before.tensors, filled)
            written.append(write_file(aside, rank, boxes_of(filled, file_name(rank))))
        return commit_checkpoint(save, metadata, written), layout
    # Ctrl-C leaves nothing behind either.
    except BaseException:
        folders.discard(save, before.iteration)
        raise


def model_of_checkpoint(source: Source) -> tuple[str, ModelDescription]:
    """Raises CheckpointError: no such model in the registry, or the configuration is missing or invalid."""
    config = source.metadata.config
    model = model_of(source.metadata.model, source.tensors)
    if config is None or model is None:
        raise CheckpointError(
            f"{source.path} holds weights without the configuration of a model known here ({', '.join(MODELS)}): lay "
            "out what a run saves that starts from it with --load ... --finetune"
        )
    return model.name, registry.saved_model(source.path, model, config)[1]


def target_ranks(
    description: ModelDescription, tensors: Mapping[str, Tensor], target: Target, bounds: Sequence[range]
) -> list[list[ShardedTensor]]:
    """Each target rank's tensors, without memory, stage by stage.

    Raises:
        ValueError: the model cannot be cut like this, or the checkpoint does not hold exactly its tensors.
    """
    ranks = []
    problems = []
    known = set[str]()
    for stage in range(target.pipeline):
        mine = list[int]()
        for span, home in zip(bounds, target.placement, strict=True):
            if home == stage:
                mine += span
        for rank in range(target.tensor):
            # A layer depends on its tensor-parallel rank only, not on its stage.
            state = ParallelState.without_process_groups(Grid(tp=target.tensor), rank)
            layers = description.named_layers(BuildContext(state))
            saved_entries = list[ShardedTensor]()
            for entry in sharded_tensors([layers[index] for index in mine]):
                found = list(tensors[entry.name].shape) if entry.name in tensors else "missing"
                needed = list(entry.shard.global_shape)
                if found != needed:
                    problems.append(f"{entry.name}: {found}, the model needs {needed}")
                saved_entries += _as_saved(entry, tensors)
            known.update(entry.name for entry in saved_entries)
            ranks.append(saved_entries)
    problems += [f"{name}: saved, but its model has no such tensor" for name in tensors if name not in known]
    raise_problems("the checkpoint is not of the model that it describes:", problems)
    return ranks


def _as_saved(entry: ShardedTensor, tensors: Mapping[str, Tensor]) -> Iterator[ShardedTensor]:
    """In its saved type, with its average and optimizer state."""
    prefixes = ["", AVERAGE]
    if entry.is_parameter:
        prefixes += sorted({f"{OPTIMIZER}{kind}." for kind, _ in state_names(tensors)})
    for prefix in prefixes:
        name = f"{prefix}{entry.name}"
        if name in tensors:
            shape = tuple(tensors[name].shape)
            shard = entry.shard
            # A single number, such as the optimizer's step, is whole on every rank.
            if shape != shard.global_shape:
                shard = Shard(shape, coordinates=entry.shard.coordinates)
            yield ShardedTensor(name, tensors[name].new_empty(shard.local_shape), shard, False)
