"""Where the layers go on a target grid."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any, Literal

import torch

from megasnn.checkpoint import CheckpointError
from megasnn.convert.model import SavedModel
from megasnn.convert.source import Facts, TensorInfo
from megasnn.convert.target import TargetRank, target_ranks
from megasnn.layers import BuildContext
from megasnn.models.description import ModelDescription
from megasnn.pipeline.costs import layers_per_chunk, measure_layers
from megasnn.pipeline.p2p import WireOptions
from megasnn.schedule.partition import layout_to_bounds, loop_placement, parse_layout, placed_bounds, v_placement

TENSOR_FLAG, PIPELINE_FLAG = "--target-tensor-parallel-size", "--target-pipeline-parallel-size"
VIRTUAL_FLAG, SHAPE_FLAG = "--target-virtual-stages", "--target-placement"
LAYOUT_FLAG = "--pipeline-model-parallel-layout"
_LARGEST_INPUT = 16 << 20  # values; of ImageNet over four time steps it is 0.6 million


@dataclass(frozen=True)
class Target:
    """
    Attributes:
        tensor, pipeline, virtual: sizes of the target grid.
        shape: how the chunks of a pipeline rank are placed: round and round, or down and up again.
        layout: units or layers in each chunk, as `--pipeline-model-parallel-layout` takes them; None for the cut that
            the checkpoint was written with where it has as many chunks, otherwise one that balances measured costs.
    """

    tensor: int
    pipeline: int
    virtual: int = 1
    layout: str | None = None
    shape: Literal["loop", "v"] = "loop"

    @property
    def placement(self) -> tuple[int, ...]:
        return v_placement(self.pipeline) if self.shape == "v" else loop_placement(self.pipeline, self.virtual)

    def refuse_impossible(self, model: SavedModel) -> None:
        """Raises CheckpointError with the values when the model cannot be cut like this."""
        for flag, value in ((TENSOR_FLAG, self.tensor), (PIPELINE_FLAG, self.pipeline), (VIRTUAL_FLAG, self.virtual)):
            if value < 1:
                raise CheckpointError(f"{flag} must be at least 1, got {value}")
        if self.shape == "v" and self.virtual != 2:
            raise CheckpointError(f"{SHAPE_FLAG} v places two chunks on each rank; {VIRTUAL_FLAG} is {self.virtual}")
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
        _refuse_large_input(model.description)
        costs = measure_layers(model.description, 1, BuildContext(), torch.device("cpu"), WireOptions())
        return placed_bounds([cost.seconds for cost in costs], placement)


def _refuse_large_input(model: ModelDescription) -> None:
    """No saved tensor shows how large a sample is. Raises ValueError for one that would take all memory."""
    shape = model.input_shape if len(model.input_shape) == 4 else (model.time_steps, *model.input_shape)
    if prod(shape) > _LARGEST_INPUT:
        raise ValueError(
            f"the checkpoint describes samples of T x C x H x W = {' x '.join(map(str, shape))} values, too many to "
            f"measure its layers with; give the cut with {LAYOUT_FLAG}"
        )


@dataclass(frozen=True)
class LaidOut:
    """Attributes: the ranks, and the layout as metadata.json tells it."""

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
