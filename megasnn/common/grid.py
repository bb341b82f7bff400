"""The grid of ranks: pp x dp_replicate x dp_shard x cp x tp, always in this order.

    rank = (((pp * DP_REPLICATE + dp_replicate) * DP_SHARD + dp_shard) * CP + cp) * TP + tp

With tp 2, dp_replicate 4, pp 2, [0, 1] is a tensor-parallel group, [0, 2, 4, 6] are replicas, [0, 8] stages. Ranks
along dp_shard share one copy of the weights.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod
from typing import Literal, NamedTuple, get_args

import numpy as np

Axis = Literal["pp", "dp_replicate", "dp_shard", "cp", "tp"]
# Tensor-parallel ranks communicate most and are neighbours, pipeline stages least and furthest apart (Megatron's
# tp-cp-ep-dp-pp without experts).
AXES: tuple[Axis, ...] = get_args(Axis)
"""Slowest to fastest in the order of ranks."""
HOLDING_AXES: tuple[Axis, ...] = ("dp_replicate", "dp_shard", "cp", "tp")
"""Axes along which ranks hold the same layers, whole or cut: all but the pipeline."""
REPLICA_AXES: tuple[Axis, ...] = ("dp_replicate", "dp_shard")
"""Axes along which ranks compute different micro-batches."""
SUMMED_AXES: tuple[Axis, ...] = (*REPLICA_AXES, "cp")
"""Axes along which ranks compute the same channels on different samples, rows or tokens: gradients are summed."""

ContextCut = Literal["samples", "rows", "tokens"]
"""How ranks share a micro-batch: by samples, by pixel rows of every image, or by tokens of every sequence."""

FLAG_OF_AXIS: dict[Axis, str] = {
    "pp": "--pipeline-model-parallel-size",
    "dp_replicate": "(the rest)",
    "dp_shard": "--weight-parallel-size",
    "cp": "--context-parallel-size",
    "tp": "--tensor-model-parallel-size",
}


@dataclass(frozen=True, kw_only=True)
class Grid:
    """Number of ranks along each axis."""

    pp: int = 1
    dp_replicate: int = 1
    dp_shard: int = 1
    cp: int = 1
    tp: int = 1

    def over_ranks(self, world_size: int) -> Grid:
        """The grid over `world_size` ranks: as many replicas as they can form.

        Raises ValueError for a size below 1, or a product of the sizes that does not divide the world size.
        """
        sizes = {axis: self.size(axis) for axis in AXES if axis != "dp_replicate"}
        of_replica = prod(sizes.values())
        if min(world_size, *sizes.values()) < 1 or world_size % of_replica:
            factors = " x ".join(f"{FLAG_OF_AXIS[axis]} {size}" for axis, size in sizes.items())
            raise ValueError(
                f"world size {world_size} is no multiple of {of_replica} = {factors}: change one of these or the "
                "number of ranks (torchrun --nnodes x --nproc-per-node)"
            )
        return replace(self, dp_replicate=world_size // of_replica)

    @property
    def shape(self) -> tuple[int, ...]:
        """Sizes in the order of `AXES`."""
        return tuple(self.size(axis) for axis in AXES)

    @property
    def world_size(self) -> int:
        return prod(self.shape)

    @property
    def replicas(self) -> int:
        return self.dp_replicate * self.dp_shard

    def size(self, axis: Axis) -> int:
        return int(getattr(self, axis))

    def coordinates(self, rank: int) -> Coordinates:
        """Raises ValueError for a rank outside the grid."""
        indices = np.unravel_index(rank, self.shape)
        return Coordinates(self, *map(int, indices))

    def groups(self, *axes: Axis) -> list[list[int]]:
        """Groups along `axes`, each ascending: ``groups("tp")``, ``groups("tp", "pp")``."""
        ranks = np.arange(self.world_size).reshape(self.shape)
        inside = [dim for dim, axis in enumerate(AXES) if axis in axes]
        outside = [dim for dim, axis in enumerate(AXES) if axis not in axes]
        group_size = prod(ranks.shape[dim] for dim in inside)
        groups: list[list[int]] = ranks.transpose([*outside, *inside]).reshape(-1, group_size).tolist()
        return groups

    def __str__(self) -> str:
        shown = [axis for axis in AXES if axis not in ("dp_shard", "cp") or self.size(axis) > 1]
        return " x ".join(f"{axis} {self.size(axis)}" for axis in shown)


@dataclass(frozen=True)
class Coordinates:
    """A rank's index along each axis."""

    grid: Grid = Grid()
    pp: int = 0
    dp_replicate: int = 0
    dp_shard: int = 0
    cp: int = 0
    tp: int = 0

    def index(self, axis: Axis) -> int:
        return int(getattr(self, axis))


def micro_batch_sizes(global_batch_size: int, micro_batch_size: int) -> list[int]:
    """Samples in each micro-batch; the last one may be smaller."""
    # They depend on the batch sizes only. Norms work per micro-batch, and replicas never cut one, so every layout
    # computes the same function.
    whole, rest = divmod(global_batch_size, micro_batch_size)
    sizes = [micro_batch_size] * whole
    if rest:
        sizes.append(rest)
    return sizes


def micro_batches_of(micro_batches: int, dp_size: int, dp_rank: int) -> range:
    """One replica's consecutive indices; the first replicas may take one more."""
    each, extra = divmod(micro_batches, dp_size)
    start = dp_rank * each + min(dp_rank, extra)
    return range(start, start + each + (dp_rank < extra))


class MicroBatchCounts(NamedTuple):
    """Micro-batches in a replica's step."""

    most: int
    fewest: int

    @property
    def distinct(self) -> tuple[int, ...]:
        """The counts of a run's replicas, the larger one first."""
        return (self.most,) if self.most == self.fewest else (self.most, self.fewest)


def micro_batch_counts(samples: int, micro_batch_size: int, replicas: int, windows: int = 1) -> MicroBatchCounts:
    """A window counts as one micro-batch."""
    count = -(-samples // min(micro_batch_size, samples))
    return MicroBatchCounts(most=windows * -(-count // replicas), fewest=windows * (count // replicas))
