"""Where each rank stands in the pipeline x data x tensor grid, and which ranks form a group.

The order is Megatron's ``tp-cp-ep-dp-pp`` without the two axes in the middle: neighbouring ranks share a
tensor parallel group, then come the data parallel replicas, and the pipeline stages are furthest apart,
because that is also how much they talk to each other. With tensor 2, data 4 and pipeline 2 over 16 ranks,
[0, 1] is a tensor group, [0, 2, 4, 6] a data group and [0, 8] a pipeline group.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from typing import Literal, get_args

Axis = Literal["pipeline", "data", "tensor"]
AXES: tuple[Axis, ...] = get_args(Axis)  # slowest to fastest

FLAG_OF_AXIS: dict[Axis, str] = {
    "pipeline": "--pipeline-model-parallel-size",
    "data": "(the rest)",
    "tensor": "--tensor-model-parallel-size",
}


@dataclass(frozen=True)
class Coordinates:
    """A rank's index along each axis of the grid."""

    pipeline: int
    data: int
    tensor: int


@dataclass(frozen=True)
class Grid:
    """The sizes of the three axes. Raises ValueError when one is smaller than 1."""

    pipeline: int = 1
    data: int = 1
    tensor: int = 1

    def __post_init__(self) -> None:
        for axis in AXES:
            if self.size(axis) < 1:
                raise ValueError(
                    f"{axis} parallel size must be at least 1, got {self.size(axis)}; {FLAG_OF_AXIS[axis]}"
                )

    @classmethod
    def fit(cls, world_size: int, tensor: int = 1, pipeline: int = 1) -> Grid:
        """The grid over `world_size` ranks: what tensor and pipeline leave over is data parallel.

        Raises ValueError with every factor when the sizes do not multiply to the world size.
        """
        if world_size < 1:
            raise ValueError(f"world size must be at least 1, got {world_size}")
        model = cls(pipeline=pipeline, tensor=tensor).world_size
        if world_size % model:
            raise ValueError(
                f"world size {world_size} is not tensor {tensor} x pipeline {pipeline} x data ?: it must be "
                f"a multiple of {model}; change --tensor-model-parallel-size {tensor}, "
                f"--pipeline-model-parallel-size {pipeline} or the number of ranks "
                f"(torchrun --nnodes x --nproc-per-node)"
            )
        return cls(pipeline=pipeline, data=world_size // model, tensor=tensor)

    @property
    def world_size(self) -> int:
        return self.pipeline * self.data * self.tensor

    def size(self, axis: Axis) -> int:
        return int(getattr(self, axis))

    def coordinates(self, rank: int) -> Coordinates:
        """Raises ValueError for a rank outside the grid."""
        if not 0 <= rank < self.world_size:
            raise ValueError(f"rank {rank} is outside a grid of {self.world_size} ranks ({self})")
        rest, tensor = divmod(rank, self.tensor)
        pipeline, data = divmod(rest, self.data)
        return Coordinates(pipeline=pipeline, data=data, tensor=tensor)

    def rank(self, pipeline: int = 0, data: int = 0, tensor: int = 0) -> int:
        """Raises ValueError for coordinates outside the grid."""
        for axis, index in zip(AXES, (pipeline, data, tensor), strict=True):
            if not 0 <= index < self.size(axis):
                raise ValueError(f"{axis} index {index} is outside a grid of {self}")
        return (pipeline * self.data + data) * self.tensor + tensor

    def groups(self, *axes: Axis) -> list[list[int]]:
        """All groups of ranks that differ along `axes` only, each in ascending order.

        ``groups("tensor")`` are the tensor parallel groups, ``groups("tensor", "pipeline")`` the model
        parallel ones. Raises ValueError for an unknown axis.
        """
        for axis in axes:
            if axis not in AXES:
                raise ValueError(f"unknown axis {axis!r}; the axes are {', '.join(AXES)}")
        fixed = [range(self.size(axis)) if axis not in axes else range(1) for axis in AXES]
        varying = [range(self.size(axis)) if axis in axes else range(1) for axis in AXES]
        return [
            [self.rank(*(a + b for a, b in zip(start, step, strict=True))) for step in product(*varying)]
            for start in product(*fixed)
        ]

    def __str__(self) -> str:
        return f"pipeline {self.pipeline} x data {self.data} x tensor {self.tensor}"
