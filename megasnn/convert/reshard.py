"""A checkpoint laid out for the ranks of another grid, so that each of them reads one file.

A rank's part follows from the description of the model in the checkpoint's configuration, without building it.
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
from megasnn.convert.source import Source
from megasnn.files import CheckpointError, raise_problems
from megasnn.layers import BuildContext
from megasnn.models.build import describe
from megasnn.models.description import ModelDescription
from megasnn.models.model import run_config
from megasnn.models.registry import MODELS, model_of
from megasnn.parallel.sharding import ShardedTensor, sharded_tensors
from megasnn.parallel_state import Group
from megasnn.schedule.partition import PLACEMENTS, layout_to_bounds, parse_layout

TENSOR_FLAG, PIPELINE_FLAG = "--target-tensor-parallel-size", "--target-pipeline-parallel-size"
VIRTUAL_FLAG, PLACEMENT_FLAG = "--target-virtual-stages", "--target-placement"
LAYOUT_FLAG = "--pipeline-model-parallel-layout"


@dataclass(frozen=True)
class SavedModel:
    """Model of a checkpoint: its name, dimensions and layers."""

    name: str
    config: ModelConfig
    description: ModelDescription


@dataclass(frozen=True)
class Target:
    """Grid that a checkpoint is laid out for.

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
        """Pipeline rank of each chunk. Raises CheckpointError for chunks that a placement does not have."""
        for flag, size in ((TENSOR_FLAG, self.tensor), (PIPELINE_FLAG, self.pipeline), (VIRTUAL_FLAG, self.virtual)):
            if size < 1:
                raise CheckpointError(f"{flag} must be at least 1, got {size}")
        try:
            return PLACEMENTS[self.shape](self.pipeline, self.virtual)
        except ValueError as error:
            raise CheckpointError(f"{PLACEMENT_FLAG} {self.shape}: {error}; {VIRTUAL_FLAG} is {self.virtual}") from None

    def bounds(self, model: SavedModel, saved: str | None) -> list[range]:
        """Layers of each chunk. Raises CheckpointError for a layout that does not fit, and where none is known.

        Args:
            saved: layers in each chunk of the run that wrote the checkpoint.
        """
        layers, chunks = model.description.layers, len(self.placement)
        try:
            if self.layout is not None:
                return layout_to_bounds(parse_layout(self.layout), [layer.unit for layer in layers], chunks)
            if chunks == 1:
                return [range(len(layers))]
            if saved and len(parse_layout(saved)) == chunks:
                return layout_to_bounds(parse_layout(saved), [layer.name for layer in layers], chunks)
        except ValueError as error:
            raise CheckpointError(str(error)) from None
        raise CheckpointError(
            f"{PIPELINE_FLAG} {self.pipeline} with {VIRTUAL_FLAG} {self.virtual} makes {chunks} chunks, and the "
            f"checkpoint was cut as {saved!r}: give {LAYOUT_FLAG} the cut of the run, which its log names"
        )


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
    model, saved = saved_model(source), source.metadata
    bounds = target.bounds(model, str((saved.layout or {}).get("bounds", "")))
    ranks = target_ranks(model, source.tensors, target, bounds)
    require_intact(source.path, saved)
    layout = "|".join(str(len(span)) for span in bounds)
    sizes = {"tp": target.tensor, "pp": target.pipeline, "dp": 1, "virtual": target.virtual}
    metadata = replace(saved, model=model.name, layout={**sizes, "bounds": layout}, tensors={}, files={})
    path = write_rank_files(save, metadata, ranks, lambda entry: source.read_shard(entry.name, entry.shard))
    return path, layout


def saved_model(source: Source) -> SavedModel:
    """Describes the model of a checkpoint.

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
    """Tensors of each rank of the target, without memory, pipeline stage by pipeline stage.

    Args:
        tensors: of the checkpoint, for shapes and types.
        bounds: the layers of each chunk.
    Raises:
        CheckpointError: the model cannot be cut like this, or the checkpoint does not hold exactly its tensors.
    """
    if problems := model.config.problems(target.tensor):
        raise CheckpointError(*(text.replace("--tensor-model-parallel-size", TENSOR_FLAG) for text in problems))
    ranks, wrong = [], list[str]()
    for stage in range(target.pipeline):
        mine = [index for span, home in zip(bounds, target.placement, strict=True) if home == stage for index in span]
        for rank in range(target.tensor):
            group = Group("tp", tuple(range(target.tensor)), rank)
            try:
                layers = model.description.named_layers(BuildContext(group))
            except ValueError as error:
                raise CheckpointError(str(error).replace("--tensor-model-parallel-size", TENSOR_FLAG)) from None
            entries = list(sharded_tensors([layers[index] for index in mine]))
            wrong += [problem for entry in entries if (problem := _shape_problem(entry, tensors))]
            ranks.append([saved for entry in entries for saved in _as_saved(entry, tensors)])
    known = {entry.name for rank in ranks for entry in rank}
    wrong += [f"{name}: saved, but its model has no such tensor" for name in tensors if name not in known]
    raise_problems("the checkpoint is not of the model that it describes:", wrong)
    return ranks


def _shape_problem(entry: ShardedTensor, tensors: Mapping[str, Tensor]) -> str | None:
    needed, saved = list(entry.shard.global_shape), tensors.get(entry.name)
    if saved is not None and list(saved.shape) == needed:
        return None
    found = "missing" if saved is None else f"saved with shape {list(saved.shape)}"
    return f"{entry.name}: {found}, the model needs {needed}"


def _as_saved(entry: ShardedTensor, tensors: Mapping[str, Tensor]) -> Iterator[ShardedTensor]:
    """A tensor of the model with the type that it is saved in, its average and its optimizer state."""
    kinds = sorted({f"{OPTIMIZER}{kind}." for kind, _ in state_names(tensors)}) if entry.is_parameter else []
    for name in (entry.name, *(f"{prefix}{entry.name}" for prefix in (AVERAGE, *kinds))):
        if name in tensors:
            shape = tuple(tensors[name].shape)
            shard = entry.shard if shape == entry.shard.global_shape else entry.shard.whole(shape)
            yield ShardedTensor(name, tensors[name].new_empty(shard.local_shape), shard, False)
