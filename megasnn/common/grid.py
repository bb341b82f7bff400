"""The grid of ranks: pp x dp_replicate x dp_shard x cp x tp, always in this order, always by name.

    rank = (((pp * DP_REPLICATE + dp_replicate) * DP_SHARD + dp_shard) * CP + cp) * TP + tp

Neighbouring ranks share a tensor parallel group, pipeline stages are furthest apart: that is also how much they talk to
each other (Megatron's ``tp-cp-ep-dp-pp`` without experts). With tp 2, dp_replicate 4 and pp 2 over 16 ranks, [0, 1] is
a tensor parallel group, [0, 2, 4, 6] one of replicas and [0, 8] one of stages.

Replicas lie along two axes: neighbours along dp_shard share one copy of the weights by rows, ranks along dp_replicate
hold the same.

Micro-batches of a global batch are counted here, too. The cut depends on the global batch and micro-batch sizes only.
Normalisation works per micro-batch, so every layout computes the same function: a replica takes some of the
micro-batches and never cuts them anew.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod
from typing import Literal, get_args

import numpy as np

Axis = Literal["pp", "dp_replicate", "dp_shard", "cp", "tp"]
AXES: tuple[Axis, ...] = get_args(Axis)
"""Slowest to fastest."""
HOLDING_AXES: tuple[Axis, ...] = ("dp_replicate", "dp_shard", "cp", "tp")
"""Ranks along these hold the same layers, whole or cut; along the pipeline they hold other layers."""
REPLICA_AXES: tuple[Axis, ...] = ("dp_replicate", "dp_shard")
"""Ranks along these compute the same layers on other micro-batches."""
SUMMED_AXES: tuple[Axis, ...] = (*REPLICA_AXES, "cp")
"""Ranks along these compute the same channels on other values: a gradient is the sum over them."""

ContextCut = Literal["samples", "rows"]
"""By what ranks share a micro-batch: each has some of its samples, or of every sample some rows of pixels."""

FLAG_OF_AXIS: dict[Axis, str] = {
    "pp": "--pipeline-model-parallel-size",
    "dp_replicate": "(the rest)",
    "dp_shard": "--weight-parallel-size",
    "cp": "--context-parallel-size",
    "tp": "--tensor-model-parallel-size",
}


@dataclass(frozen=True, kw_only=True)
class Grid:
    """The sizes of the axes."""

    pp: int = 1
    dp_replicate: int = 1
    dp_shard: int = 1
    cp: int = 1
    tp: int = 1

    @classmethod
    def fit(cls, world_size: int, *, tp: int = 1, pp: int = 1, dp_shard: int = 1, cp: int = 1) -> Grid:
        """The grid over `world_size` ranks: what the other axes leave over is data parallel.

        Raises ValueError with every factor when one is below 1, or they do not multiply to the world size.
        """
        one = cls(pp=pp, dp_shard=dp_shard, cp=cp, tp=tp)
        if min(world_size, pp, dp_shard, cp, tp) < 1 or world_size % one.world_size:
            factors = " x ".join(f"{FLAG_OF_AXIS[axis]} {one.size(axis)}" for axis in AXES if axis != "dp_replicate")
            raise ValueError(
                f"world size {world_size} is no multiple of {one.world_size} = {factors}: change one of these or the "
                "number of ranks (torchrun --nnodes x --nproc-per-node)"
            )
        return replace(one, dp_replicate=world_size // one.world_size)

    @property
    def world_size(self) -> int:
        return prod(self.size(axis) for axis in AXES)

    @property
    def replicas(self) -> int:
        """Number of data parallel replicas, each of which has other micro-batches."""
        return self.dp_replicate * self.dp_shard

    def size(self, axis: Axis) -> int:
        return int(getattr(self, axis))

    def coordinates(self, rank: int) -> Coordinates:
        """Raises ValueError for a rank outside the grid."""
        indices = np.unravel_index(rank, [self.size(axis) for axis in AXES])
        return Coordinates(self, *map(int, indices))

    def groups(self, *axes: Axis) -> list[list[int]]:
        """All groups of ranks that differ along `axes` only, each in ascending order: ``groups("tp")`` are the tensor
        parallel groups, ``groups("tp", "pp")`` the model parallel ones."""
        ranks = np.arange(self.world_size).reshape([self.size(axis) for axis in AXES])
        kept, others = ([n for n, axis in enumerate(AXES) if (axis in axes) is keep] for keep in (True, False))
        groups: list[list[int]] = (
            ranks.transpose([*others, *kept]).reshape(-1, prod(ranks.shape[axis] for axis in kept)).tolist()
        )
        return groups

    def __str__(self) -> str:
        shown = [axis for axis in AXES if axis not in ("dp_shard", "cp") or self.size(axis) > 1]
        return " x ".join(f"{axis} {self.size(axis)}" for axis in shown)


@dataclass(frozen=True)
class Coordinates:
    """One rank in a grid: its index along each axis."""

    grid: Grid = Grid()
    pp: int = 0
    dp_replicate: int = 0
    dp_shard: int = 0
    cp: int = 0
    tp: int = 0

    def size(self, axis: Axis) -> int:
        return self.grid.size(axis)

    def index(self, axis: Axis) -> int:
        return int(getattr(self, axis))


def micro_batch_sizes(global_batch_size: int, micro_batch_size: int) -> list[int]:
    """Samples in each micro-batch, in order; the last one is smaller where the sizes do not divide."""
    whole, rest = divmod(global_batch_size, micro_batch_size)
    return [micro_batch_size] * whole + [rest] * (rest > 0)


def micro_batches_of(micro_batches: int, dp_size: int, dp_rank: int) -> range:
    """The contiguous run of global micro-batch indices that one data parallel replica computes.

    The first replicas take one more where the number does not divide; in evaluation, the last may get none.
    """
    each, extra = divmod(micro_batches, dp_size)
    start = dp_rank * each + min(dp_rank, extra)
    return range(start, start + each + (dp_rank < extra))


def micro_batch_counts(samples: int, micro_batch_size: int, replicas: int, windows: int = 1) -> tuple[int, ...]:
    """Micro-batches in a step of the replica with most, and of the one with least where that has another number.

    Args:
        samples: of the global batch. windows: of time steps, each of which is a micro-batch of its own.
    """
    count = -(-samples // min(micro_batch_size, samples))
    return tuple(windows * each for each in dict.fromkeys((-(-count // replicas), count // replicas)))
