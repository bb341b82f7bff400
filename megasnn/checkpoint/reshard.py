"""A checkpoint laid out for the ranks of another grid, so that each of them reads one file.

A rank's part follows from the description of the model in the checkpoint's configuration, without building it.
"""

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
    """Grid that a checkpoint is laid out for.

    Attributes:
        tensor, pipeline, virtual: sizes of the target grid.
        layout: layer groups or layers in each chunk, as `--pipeline-model-parallel-layout` takes them; None for the cut
            that the checkpoint was written with, or with another number of chunks an even one.
        shape: how the chunks of a pipeline rank are placed, by a name in PLACEMENTS.
    """

    tensor: int = 1
    pipeline: int = 1
    virtual: int = 1
    layout: str | None = None
    shape: str = "loop"

    @property
    def placement(self) -> tuple[int, ...]:
        """Pipeline rank of each chunk. Raises ValueError for chunks that a placement does not have."""
        if min(sizes := (self.tensor, self.pipeline, self.virtual)) < 1:
            raise ValueError(f"every size of the target must be at least 1, got {sizes}")
        return PLACEMENTS[self.shape](self.pipeline, self.virtual)

    def bounds(self, description: ModelDescription, saved: str) -> list[range]:
        """Layers of each chunk. Raises ValueError for a layout that does not fit, or more chunks than layers.

        Args:
            saved: layers in each chunk of the run that wrote the checkpoint.
        """
        chunks, layout, layer_groups = (
            len(self.placement),
            self.layout,
            [layer.layer_group for layer in description.layers],
        )
        if layout is None and saved.count("|") + 1 != chunks:
            return placed_bounds([layer.operations for layer in description.layers], self.placement)
        if layout is None:
            layout, layer_groups = saved or str(len(layer_groups)), [layer.name for layer in description.layers]
        return layout_to_bounds(parse_layout(layout), layer_groups, chunks)


def reshard(source: Source, save: Path, target: Target) -> tuple[Path, str]:
    """Writes the source's checkpoint to `<save>/iter_<iteration>` with a file for each rank of the target.

    Iteration, place in the data and optimizer state stay: a run goes on from it as from the source. A rank's file also
    holds copies of the tensors that another rank of its tensor-parallel group answers for.

    Args:
        source: without values.
    Returns:
        the new checkpoint, and the layers of each chunk as `--pipeline-model-parallel-layout` takes them.
    Raises:
        CheckpointError: the source is of no model known here or damaged, or `save` holds checkpoints already.
        ValueError: the model cannot be cut like this. Nothing is left behind then, nor where writing fails.
    """
    folders.require_empty(save)
    saved = source.metadata
    name, description = model_of_checkpoint(source)
    bounds = target.bounds(description, str((saved.layout or {}).get("bounds", "")))
    ranks = target_ranks(description, source.tensors, target, bounds)
    require_intact(source.path, saved)
    layout = "|".join(str(len(span)) for span in bounds)
    sizes = {"tp": target.tensor, "pp": target.pipeline, "dp": 1, "virtual": target.virtual}
    metadata = replace(saved, model=name, layout={**sizes, "bounds": layout}, tensors={}, files={})
    aside, written = folders.begin(save, saved.iteration), list[Written]()
    try:
        for rank, entries in enumerate(ranks):
            held = [replace(entry, tensor=torch.empty_like(entry.tensor, device="cpu")) for entry in entries]
            read_boxes(source.path, saved.tensors, held)
            written.append(write_file(aside, rank, boxes_of(held, file_name(rank))))
        return commit_checkpoint(save, metadata, written), layout
    except BaseException:
        folders.discard(save, saved.iteration)
        raise


def model_of_checkpoint(source: Source) -> tuple[str, ModelDescription]:
    """Name and description of the model of a checkpoint.

    Raises:
        CheckpointError: it is none of the registry of models, its configuration is not there, or cannot be.
    """
    config, model = source.metadata.config, model_of(source.metadata.model, source.tensors)
    if config is None or model is None:
        raise CheckpointError(
            f"{source.path} holds weights without the configuration of a model known here ({', '.join(MODELS)}): lay "
            "out what a run saves that starts from it with --load ... --finetune"
        )
    return model.name, registry.saved_model(source.path, model, config)[1]


def target_ranks(
    description: ModelDescription, tensors: Mapping[str, Tensor], target: Target, bounds: Sequence[range]
) -> list[list[ShardedTensor]]:
    """Tensors of each rank of the target, without memory, pipeline stage by pipeline stage.

    Raises ValueError where the model cannot be cut like this, or the checkpoint does not hold exactly its tensors.
    """
    ranks, wrong = [], list[str]()
    for stage in range(target.pipeline):
        mine = [index for span, home in zip(bounds, target.placement, strict=True) if home == stage for index in span]
        for rank in range(target.tensor):
            state = ParallelState.without_process_groups(Grid(tp=target.tensor), rank)
            layers = description.named_layers(BuildContext(state))
            entries = list(sharded_tensors([layers[index] for index in mine]))
            for entry in entries:
                found = list(tensors[entry.name].shape) if entry.name in tensors else "missing"
                if found != (needed := list(entry.shard.global_shape)):
                    wrong.append(f"{entry.name}: {found}, the model needs {needed}")
            ranks.append([saved for entry in entries for saved in _as_saved(entry, tensors)])
    known = {entry.name for rank in ranks for entry in rank}
    wrong += [f"{name}: saved, but its model has no such tensor" for name in tensors if name not in known]
    raise_problems("the checkpoint is not of the model that it describes:", wrong)
    return ranks


def _as_saved(entry: ShardedTensor, tensors: Mapping[str, Tensor]) -> Iterator[ShardedTensor]:
    """A tensor of the model with the type that it is saved in, its average and its optimizer state."""
    kinds = sorted({f"{OPTIMIZER}{kind}." for kind, _ in state_names(tensors)}) if entry.is_parameter else []
    for name in (entry.name, *(f"{prefix}{entry.name}" for prefix in (AVERAGE, *kinds))):
        if name in tensors:
            shape = tuple(tensors[name].shape)
            shard = (
                entry.shard if shape == entry.shard.global_shape else Shard(shape, coordinates=entry.shard.coordinates)
            )
            yield ShardedTensor(name, tensors[name].new_empty(shard.local_shape), shard, False)
