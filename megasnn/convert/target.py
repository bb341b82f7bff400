"""The ranks of a target grid: which layers each of them has, and what it would hold of a checkpoint.

All of it follows from the description of the model that the checkpoint's configuration tells, without building it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch

from megasnn.checkpoint.description import AVERAGE, PREFIX
from megasnn.comm.group import Group
from megasnn.config import ModelConfig, PretrainConfig, from_dict
from megasnn.convert.source import Facts, TensorInfo, TensorSource
from megasnn.files.problems import CheckpointError, raise_problems
from megasnn.layers import BuildContext
from megasnn.models.building import describe
from megasnn.models.description import ModelDescription
from megasnn.models.dialects import model_of
from megasnn.models.model import Model, run_config
from megasnn.models.table import MODELS
from megasnn.pipeline.cost_model import layers_per_chunk
from megasnn.pipeline.p2p import WireOptions
from megasnn.pipeline.profile_layers import profile_layers
from megasnn.schedule.partition import PLACEMENTS, layout_to_bounds, parse_layout, placed_bounds
from megasnn.sharded_tensors import ShardedTensor, sharded_tensors
from megasnn.sharding import Shard


@dataclass(frozen=True)
class SavedModel:
    """The model that a checkpoint is of.

    Attributes:
        name: in the table of models.
        config: the dimensions.
        description: the layers.
    """

    name: str
    config: ModelConfig
    description: ModelDescription


def saved_model(source: TensorSource) -> SavedModel:
    """The model that a source's weights are of.

    Raises:
        CheckpointError: it is none of the table of models, or there is no configuration of it (weights from elsewhere).
    """
    config, model = source.facts.config, model_of(source.facts.model, source.tensors)
    if config is None:
        raise CheckpointError(
            f"{source.path} holds weights without a model configuration, so how its tensors are cut is not known; "
            "start a run from it with --load ... --finetune: what that run saves can be laid out"
        )
    if model is None:
        raise CheckpointError(f"{source.path} is of a model that is unknown here; known: {', '.join(MODELS)}")
    return configured_model(model, config, source.path)


def configured_model(model: type[Model], config: Mapping[str, Any], path: object) -> SavedModel:
    """The model of a saved configuration {"model": ..., "neuron": ...}.

    Raises:
        CheckpointError: it is no configuration of this model, or one that cannot be.
    """
    try:
        run: PretrainConfig = from_dict(run_config(model), {part: config[part] for part in ("model", "neuron")})
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path} is not of the model {model.name} as it is here: {error}") from None
    if problems := run.model.problems(tensor_parallel=1):  # before its layers are counted out
        raise CheckpointError(f"{path}: there is no model {model.name} like this:", *problems)
    try:
        described = describe(run.model, run.neuron.spec)
    except ValueError as error:
        raise CheckpointError(f"{path}: there is no model {model.name} like this: {error}") from None
    return SavedModel(model.name, run.model, described)


def config_problems(source: TensorSource) -> list[str]:
    """What is wrong with the configuration that a checkpoint keeps: fields, sizes, tensors that are others.

    None is found where there is no configuration, or the model is none of the table.
    """
    model = model_of(source.facts.model, source.tensors)
    if source.facts.config is None or model is None:
        return []
    try:
        saved = configured_model(model, source.facts.config, source.path)
        _refuse_large_input(saved.description, _LARGEST_SAMPLE)
        target_ranks(saved, source.tensors, 1, [range(len(saved.description.layers))], (0,))
    except (CheckpointError, ValueError) as error:
        return [str(error)]
    return []


TENSOR_FLAG, PIPELINE_FLAG = "--target-tensor-parallel-size", "--target-pipeline-parallel-size"
VIRTUAL_FLAG, SHAPE_FLAG = "--target-virtual-stages", "--target-placement"
LAYOUT_FLAG = "--pipeline-model-parallel-layout"
_LARGEST_INPUT = 16 << 20  # values; of ImageNet over four time steps it is 0.6 million
_LARGEST_SAMPLE = 1 << 31  # values; nobody trains on a sample of 8 GB


@dataclass(frozen=True)
class Target:
    """The grid that a checkpoint is laid out for.

    Attributes:
        tensor, pipeline, virtual: sizes of the target grid.
        shape: how the chunks of a pipeline rank are placed, by a name in PLACEMENTS.
        layout: units or layers in each chunk, as `--pipeline-model-parallel-layout` takes them; None for the cut that
            the checkpoint was written with where it has as many chunks, otherwise one that balances measured costs.
    """

    tensor: int
    pipeline: int
    virtual: int = 1
    layout: str | None = None
    shape: str = "loop"

    @property
    def placement(self) -> tuple[int, ...]:
        """The pipeline rank of each chunk. Raises ValueError for an unknown shape, or chunks that it does not have."""
        return PLACEMENTS[self.shape](self.pipeline, self.virtual)

    def refuse_impossible(self, model: SavedModel) -> None:
        """Raises CheckpointError with the values when the model cannot be cut like this."""
        for flag, value in ((TENSOR_FLAG, self.tensor), (PIPELINE_FLAG, self.pipeline), (VIRTUAL_FLAG, self.virtual)):
            if value < 1:
                raise CheckpointError(f"{flag} must be at least 1, got {value}")
        try:
            _ = self.placement
        except ValueError as error:
            raise CheckpointError(f"{SHAPE_FLAG} {self.shape}: {error}; {VIRTUAL_FLAG} is {self.virtual}") from None
        problems = [
            text.replace("--tensor-model-parallel-size", TENSOR_FLAG) for text in model.config.problems(self.tensor)
        ]
        layers = len(model.description.layers)
        if self.pipeline * self.virtual > layers and self.layout is None:
            problems.append(
                f"{PIPELINE_FLAG} {self.pipeline} x {VIRTUAL_FLAG} {self.virtual} are more chunks than the model has "
                f"layers ({layers})"
            )
        if problems:
            raise CheckpointError(*problems)

    def bounds(self, model: SavedModel, facts: Facts) -> list[range]:
        """The layers of each chunk. Raises ValueError for a layout that does not fit."""
        placement, layers = self.placement, model.description.layers
        if self.layout is not None:
            return layout_to_bounds(parse_layout(self.layout), [layer.unit for layer in layers], len(placement))
        if len(placement) == 1:
            return [range(len(layers))]
        saved = parse_layout(str((facts.layout or {}).get("bounds", len(layers))))
        if len(saved) == len(placement):
            return layout_to_bounds(saved, [layer.name for layer in layers], len(placement))
        try:
            _refuse_large_input(model.description, _LARGEST_INPUT)
        except ValueError as error:
            raise ValueError(f"{error} to measure its layers with; give the cut with {LAYOUT_FLAG}") from None
        costs = profile_layers(model.description, 1, BuildContext(), torch.device("cpu"), WireOptions())
        return placed_bounds([cost.seconds for cost in costs], placement)


def _refuse_large_input(model: ModelDescription, most: int) -> None:
    """No saved tensor shows how large a sample is. Raises ValueError for one with more than so many values."""
    shape = model.input_shape if len(model.input_shape) == 4 else (model.time_steps, *model.input_shape)
    if prod(shape) > most:
        sizes = " x ".join(map(str, shape))
        raise ValueError(f"the checkpoint describes samples of T x C x H x W = {sizes} values, too many")


@dataclass(frozen=True)
class LaidOut:
    """The ranks of a target grid, and its layout as metadata.json tells it."""

    ranks: list[TargetRank]
    layout: dict[str, Any]


def lay_out(target: Target, model: SavedModel, facts: Facts, tensors: Mapping[str, TensorInfo]) -> LaidOut:
    """What each rank of the target holds. Raises CheckpointError for sizes and tensors that do not fit the model."""
    target.refuse_impossible(model)
    whole = range(len(model.description.layers))
    target_ranks(model, tensors, 1, [whole], (0,))  # before layers of the sizes that the file claims are tried out
    try:
        bounds = target.bounds(model, facts)
    except ValueError as error:
        raise CheckpointError(str(error)) from None
    ranks = target_ranks(model, tensors, target.tensor, bounds, target.placement)
    sizes = {"tensor": target.tensor, "pipeline": target.pipeline, "data": 1, "virtual": target.virtual}
    return LaidOut(ranks, {**sizes, "bounds": layers_per_chunk(bounds)})


@dataclass(frozen=True)
class TargetRank:
    """One rank of the target; replicas hold the same.

    Attributes:
        tensor, pipeline: its place.
        entries: its tensors, without memory, the optimizer's state among them.
    """

    tensor: int
    pipeline: int
    entries: list[ShardedTensor]


def target_ranks(
    model: SavedModel,
    tensors: Mapping[str, TensorInfo],
    tensor_size: int,
    bounds: Sequence[range],
    placement: Sequence[int],
) -> list[TargetRank]:
    """All ranks that hold something different, pipeline by pipeline stage.

    Args:
        tensors: what the checkpoint holds.
        bounds: the layers of each chunk.
        placement: the pipeline rank of each chunk.
    Raises:
        CheckpointError: the checkpoint does not hold exactly the model's tensors (lists them).
        ValueError: a dimension cannot be cut over so many ranks.
    """
    ranks = [TargetRank(rank, stage, []) for stage in range(max(placement) + 1) for rank in range(tensor_size)]
    taken: set[str] = set()
    problems: list[str] = []
    for rank in ranks:
        group = Group("tensor", tuple(range(tensor_size)), rank.tensor)
        layers = model.description.named_layers(BuildContext(group))
        mine = [
            layers[index]
            for span, home in zip(bounds, placement, strict=True)
            if home == rank.pipeline
            for index in span
        ]
        for entry in sharded_tensors(mine):
            rank.entries.extend(_saved(entry, tensors, problems))
        taken.update(entry.name for entry in rank.entries)
    problems += [f"{name}: saved, but its model has no such tensor" for name in tensors if name not in taken]
    raise_problems("the checkpoint is not of the model that it describes:", problems)
    return ranks


def _saved(entry: ShardedTensor, tensors: Mapping[str, TensorInfo], problems: list[str]) -> Iterator[ShardedTensor]:
    """A tensor of the model as it is saved, its average and its optimizer state."""
    info = tensors.get(entry.name)
    if info is None or info.shape != entry.shard.global_shape:
        found = "missing" if info is None else f"saved with shape {list(info.shape)}"
        problems.append(f"{entry.name}: {found}, the model needs {list(entry.shard.global_shape)}")
        return
    yield without_memory(entry.name, entry.shard, info)
    average = tensors.get(f"{AVERAGE}{entry.name}")
    if average is not None and average.shape == info.shape:
        yield without_memory(f"{AVERAGE}{entry.name}", entry.shard, average)
    for kind in optimizer_kinds(tensors) if entry.is_parameter else ():
        state = tensors.get(f"{PREFIX}{kind}.{entry.name}")
        if state is not None:
            name = f"{PREFIX}{kind}.{entry.name}"
            yield without_memory(name, entry.shard if state.shape == info.shape else entry.shard.whole(), state)


def optimizer_kinds(tensors: Mapping[str, TensorInfo]) -> list[str]:
    """The kinds of optimizer state there are, like `exp_avg`."""
    return sorted({name.removeprefix(PREFIX).split(".", 1)[0] for name in tensors if name.startswith(PREFIX)})


def without_memory(name: str, shard: Shard, info: TensorInfo) -> ShardedTensor:
    """Described like a rank's part, with a single element of memory: cutting it costs less than on the meta device."""
    return ShardedTensor(name, torch.empty((), dtype=info.dtype).expand(shard.local_shape), shard, False)
