"""A checkpoint laid out for the ranks of another grid, so that each of them reads one file.

What a rank holds follows from the description of the model that the checkpoint's configuration tells, without building
it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from torch import Tensor

from megasnn.checkpoint.format import AVERAGE, OPTIMIZER
from megasnn.checkpoint.optimizer_state import state_names
from megasnn.checkpoint.tensor_io import require_intact
from megasnn.config import ModelConfig, PretrainConfig, from_dict
from megasnn.convert.rank_files import write_rank_files
from megasnn.convert.source import Source, read_shard
from megasnn.files.problems import CheckpointError, raise_problems
from megasnn.layers import BuildContext
from megasnn.models.building import describe
from megasnn.models.description import ModelDescription
from megasnn.models.dialects import model_of
from megasnn.models.model import run_config
from megasnn.models.table import MODELS
from megasnn.parallel.sharding import ShardedTensor, sharded_tensors
from megasnn.parallel_state import Group
from megasnn.schedule.partition import PLACEMENTS, layout_to_bounds, parse_layout

TENSOR_FLAG, PIPELINE_FLAG = "--target-tensor-parallel-size", "--target-pipeline-parallel-size"
VIRTUAL_FLAG, PLACEMENT_FLAG = "--target-virtual-stages", "--target-placement"
LAYOUT_FLAG = "--pipeline-model-parallel-layout"


@dataclass(frozen=True)
class SavedModel:
    """The model that a checkpoint is of: its name, dimensions and layers."""

    name: str
    config: ModelConfig
    description: ModelDescription


@dataclass(frozen=True)
class Target:
    """The grid that a checkpoint is laid out for.

    Attributes:
        tensor, pipeline, virtual: sizes of the target grid.
        layout: units or layers in each chunk, as `--pipeline-model-parallel-layout` takes them; None for the cut that
            the checkpoint was written with.
        shape: how the chunks of a pipeline rank are placed, by a name in PLACEMENTS.
    """

    tensor: int = 1
    pipeline: int = 1
    virtual: int = 1
    layout: str | None = None
    shape: str = "loop"

    @property
    def placement(self) -> tuple[int, ...]:
        """The pipeline rank of each chunk. Raises CheckpointError for chunks that a placement does not have."""
        for flag, size in ((TENSOR_FLAG, self.tensor), (PIPELINE_FLAG, self.pipeline), (VIRTUAL_FLAG, self.virtual)):
            if size < 1:
                raise CheckpointError(f"{flag} must be at least 1, got {size}")
        try:
            return PLACEMENTS[self.shape](self.pipeline, self.virtual)
        except ValueError as error:
            raise CheckpointError(f"{PLACEMENT_FLAG} {self.shape}: {error}; {VIRTUAL_FLAG} is {self.virtual}") from None

    def bounds(self, model: SavedModel, saved: str | None) -> list[range]:
        """The layers of each chunk. Raises CheckpointError for a layout that does not fit, and where none is known.

        Args:
            saved: the layout that the checkpoint was written with.
        """
        layers, chunks = model.description.layers, len(self.placement)
        if self.layout is None and chunks == 1:
            return [range(len(layers))]
        if self.layout is None and (saved is None or len(parse_layout(saved)) != chunks):
            raise CheckpointError(
                f"{PIPELINE_FLAG} {self.pipeline} with {VIRTUAL_FLAG} {self.virtual} makes {chunks} chunks, and the "
                f"checkpoint was cut as {saved!r}: give {LAYOUT_FLAG} the cut of the run, which its log names"
            )
        try:
            if self.layout is not None:
                return layout_to_bounds(parse_layout(self.layout), [layer.unit for layer in layers], chunks)
            return layout_to_bounds(parse_layout(str(saved)), [layer.name for layer in layers], chunks)
        except ValueError as error:
            raise CheckpointError(str(error)) from None


def reshard(source: Source, save: Path, target: Target) -> tuple[Path, str]:
    """Writes the source's checkpoint to `<save>/iter_<iteration>` with a file for each rank of the target.

    Iteration, place in the data and optimizer state stay: a run goes on from it as from the source.

    Returns:
        the new checkpoint, and the layers of each chunk as `--pipeline-model-parallel-layout` takes them.
    Raises:
        CheckpointError: the source is of no model known here, the model cannot be cut like this, there is a
            checkpoint of this iteration in `save`, or the source is damaged.
    """
    if save.resolve() in (source.path.resolve(), source.path.resolve().parent):
        raise CheckpointError(f"--save {save} is where the checkpoint is read from; give another folder")
    model, told = saved_model(source), source.metadata
    bounds = target.bounds(model, str((told.layout or {}).get("bounds", "")) or None)
    ranks = target_ranks(model, source.tensors, target, bounds)
    require_intact(source.path, told)
    layout = "|".join(str(len(span)) for span in bounds)
    sizes = {"tensor": target.tensor, "pipeline": target.pipeline, "data": 1, "virtual": target.virtual}
    metadata = replace(told, model=model.name, layout={**sizes, "bounds": layout}, tensors={}, files={})

    def read(entry: ShardedTensor) -> Tensor:
        return read_shard(source.path, told, entry.name, entry.shard)

    return write_rank_files(save, metadata, ranks, read), layout


def saved_model(source: Source) -> SavedModel:
    """The model that a checkpoint is of.

    Raises:
        CheckpointError: it is none of the registry of models, there is no configuration of it (weights from
            elsewhere), or one that cannot be.
    """
    config, model = source.metadata.config, model_of(source.metadata.model, source.tensors)
    if config is None:
        raise CheckpointError(
            f"{source.path} holds weights without a model configuration, so how its tensors are cut is not known; "
            "start a run from it with --load ... --finetune: what that run saves can be laid out"
        )
    if model is None:
        raise CheckpointError(f"{source.path} is of a model that is unknown here; known: {', '.join(MODELS)}")
    title = f"{source.path}: there is no model {model.name} like this:"
    try:
        run: PretrainConfig = from_dict(run_config(model), {part: config[part] for part in ("model", "neuron")})
        raise_problems(title, run.model.problems(tensor_parallel=1))
        return SavedModel(model.name, run.model, describe(run.model, run.neuron.spec))
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{title} {error}") from None


def target_ranks(
    model: SavedModel, tensors: Mapping[str, Tensor], target: Target, bounds: Sequence[range]
) -> list[list[ShardedTensor]]:
    """What each rank of the target holds of a checkpoint, without memory, pipeline stage by pipeline stage.

    Args:
        tensors: what the checkpoint holds, for shapes and types.
        bounds: the layers of each chunk.
    Raises:
        CheckpointError: the model cannot be cut like this, or the checkpoint does not hold exactly its tensors.
    """
    if problems := model.config.problems(target.tensor):
        raise CheckpointError(*(text.replace("--tensor-model-parallel-size", TENSOR_FLAG) for text in problems))
    ranks, missing = [], list[str]()
    for stage in range(target.pipeline):
        mine = [index for span, home in zip(bounds, target.placement, strict=True) if home == stage for index in span]
        for rank in range(target.tensor):
            group = Group("tensor", tuple(range(target.tensor)), rank)
            layers = model.description.named_layers(BuildContext(group))
            entries = sharded_tensors([layers[index] for index in mine])
            ranks.append([held for entry in entries for held in _saved(entry, tensors, missing)])
    taken = {entry.name for rank in ranks for entry in rank}
    unknown = [f"{name}: saved, but its model has no such tensor" for name in tensors if name not in taken]
    raise_problems("the checkpoint is not of the model that it describes:", missing + unknown)
    return ranks


def _saved(entry: ShardedTensor, tensors: Mapping[str, Tensor], missing: list[str]) -> Iterator[ShardedTensor]:
    """A tensor of the model as it is saved, its average and its optimizer state."""
    shape = entry.shard.global_shape
    if entry.name not in tensors or tuple(tensors[entry.name].shape) != shape:
        found = "missing" if entry.name not in tensors else f"saved with shape {list(tensors[entry.name].shape)}"
        missing.append(f"{entry.name}: {found}, the model needs {list(shape)}")
        return
    kinds = {f"{OPTIMIZER}{kind}." for kind, _ in state_names(tensors)} if entry.is_parameter else set()
    for name in (entry.name, *(f"{prefix}{entry.name}" for prefix in (AVERAGE, *sorted(kinds)))):
        if name in tensors:
            whole = tuple(tensors[name].shape) != shape
            shard = entry.shard.whole(tuple(tensors[name].shape)) if whole else entry.shard
            local = tensors[name].new_empty(shard.local_shape)
            yield ShardedTensor(name, local, shard, False)
