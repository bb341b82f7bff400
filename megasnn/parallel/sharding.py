"""Shards: a rank's part in each global tensor. Layers declare them; everything else reads them.

Initial values, counts, norms and checkpoints need no matching on names. The idea is Megatron-core's ``ShardedTensor``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise, product
from math import prod
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megasnn.common.files import quantity
from megasnn.common.grid import FLAG_OF_AXIS, HOLDING_AXES, Axis, Coordinates

Initialiser = Callable[[Tensor, torch.Generator], object]


@dataclass(frozen=True)
class Piece:
    """A box in a local tensor and its position in the global tensor."""

    local_offset: tuple[int, ...]
    global_offset: tuple[int, ...]
    sizes: tuple[int, ...]

    def of_local(self, local: Tensor) -> Tensor:
        return _box(local, self.local_offset, self.sizes)

    def of_global(self, full: Tensor) -> Tensor:
        return _box(full, self.global_offset, self.sizes)


def _box(tensor: Tensor, offset: tuple[int, ...], sizes: tuple[int, ...]) -> Tensor:
    for dim, (start, length) in enumerate(zip(offset, sizes, strict=True)):
        tensor = tensor.narrow(dim, start, length)
    # A scalar may be owned as one row.
    return tensor if sizes else tensor.view(())


@dataclass(frozen=True)
class Cut:
    """Division over ranks along one grid axis.

    Attributes:
        blocks: equal blocks in `dim`, each divided separately (3 for fused q, k, v).
        even: parts must be equal; otherwise `own_span` divides.
    """

    dim: int
    blocks: int = 1
    even: bool = True


def own_span(rows: int, sizes: Sequence[int], index: int) -> range:
    """A rank's contiguous part. Parts differ by at most one row; a single row is rank 0's.

    Args:
        sizes: the ranks' axes, slowest first. Each divides the part left by earlier ones.
        index: among all `prod(sizes)` ranks.
    """
    start = 0
    ranks = prod(sizes)
    for size in sizes:
        ranks //= size
        own, index = divmod(index, ranks)
        first = -(-rows * own // size)
        end = -(-rows * (own + 1) // size)
        start += first
        rows = end - first
    return range(start, start + rows)


def context_spans(length: int, ranks: int, each_one: str) -> tuple[range, ...]:
    """Each context-parallel rank's rows or tokens, divided as evenly as possible.

    Args:
        each_one: "row" or "token".
    Raises:
        ValueError: fewer of them than ranks.
    """
    if length < ranks:
        raise ValueError(
            f"{quantity(length, each_one)} for {ranks} ranks: with --context-parallel-cut {each_one}s, "
            f"--context-parallel-size may be {length} at most here"
        )
    return tuple(own_span(length, [ranks], rank) for rank in range(ranks))


@dataclass(frozen=True)
class Shard:
    """One rank's part of a global tensor.

    Attributes:
        cuts: by axis, in order; a later cut divides the part left by earlier ones. Ranks along other axes hold the same
            part.
        partial_gradient: sum a replicated parameter's gradient over the tensor parallel ranks (a PLIF neuron's time
            constant with sharded channels).

    Raises:
        ValueError: a dimension does not divide into equal parts, or a tensor cut along tp has a `partial_gradient`.
    """

    global_shape: tuple[int, ...]
    cuts: tuple[tuple[Axis, Cut], ...] = ()
    coordinates: Coordinates = Coordinates()
    partial_gradient: bool = False
    initialise: Initialiser | None = None

    def __post_init__(self) -> None:
        if self.partial_gradient and any(axis == "tp" for axis, _ in self.cuts):
            raise ValueError("partial_gradient=True is for parameters without a cut along tp: remove one of the two")
        self._indices()

    def __deepcopy__(self, memo: dict[int, Any]) -> Shard:
        # A copied module shares it: `initialise` may hold objects that cannot be copied.
        return self

    def _indices(self) -> list[np.ndarray]:
        """Indices into the global tensor, by dimension."""
        shape = self.global_shape
        if not shape and any(not cut.even for _, cut in self.cuts):
            # A scalar owned by one of several ranks is one row.
            shape = (1,)
        indices = [np.arange(length) for length in shape]
        for axis, cut in self.cuts:
            size = self.coordinates.grid.size(axis)
            length = len(indices[cut.dim])
            if cut.even and length % (cut.blocks * size):
                raise ValueError(
                    f"dimension {cut.dim} of shape {list(shape)}, {quantity(cut.blocks, 'block')} of "
                    f"{length // cut.blocks}, cannot be cut into {size} equal parts; choose a "
                    f"{FLAG_OF_AXIS[axis]} that divides it"
                )
            blocks = indices[cut.dim].reshape(cut.blocks, -1)
            own = own_span(blocks.shape[1], [size], self.coordinates.index(axis))
            indices[cut.dim] = blocks[:, own.start : own.stop].reshape(-1)
        return indices

    def is_cut(self, axis: Axis) -> bool:
        """Whether ranks along `axis` hold different parts."""
        return self.coordinates.grid.size(axis) > 1 and any(axis == other for other, _ in self.cuts)

    @property
    def shared_axes(self) -> tuple[Axis, ...]:
        """Axes along which other ranks hold the same part."""
        return tuple(axis for axis in HOLDING_AXES if self.coordinates.grid.size(axis) > 1 and not self.is_cut(axis))

    def is_primary(self) -> bool:
        """True on exactly one rank with the same part, which counts and writes it."""
        return all(self.coordinates.index(axis) == 0 for axis in self.shared_axes)

    @property
    def local_shape(self) -> tuple[int, ...]:
        return tuple(map(len, self._indices()))

    def pieces(self) -> list[Piece]:
        """The largest boxes making up the local tensor; none without rows."""
        if not self.global_shape:
            owns_scalar = prod(self.local_shape) == 1
            return [Piece((), (), ())] if owns_scalar else []
        runs = [_runs(indices, length) for indices, length in zip(self._indices(), self.global_shape, strict=True)]
        pieces = []
        for box in product(*runs):
            local_offset, global_offset, sizes = zip(*box, strict=True)
            pieces.append(Piece(local_offset, global_offset, sizes))
        return pieces

    def by_rows(self, axis: Axis) -> Shard:
        """This part, with dimension 0 divided over `axis`."""
        if self.coordinates.grid.size(axis) == 1:
            return self
        return replace(self, cuts=(*self.cuts, (axis, Cut(0, even=False))))

    def cut(self, full: Tensor) -> Tensor:
        """A copy of this rank's part."""
        local = full.new_empty(self.local_shape)
        for piece in self.pieces():
            piece.of_local(local).copy_(piece.of_global(full))
        return local


def _runs(indices: np.ndarray, length: int) -> list[tuple[int, int, int]]:
    """(position, first index, length) by run of consecutive indices into a dimension of `length`."""
    # Nearly always: the dimension is not divided.
    if len(indices) == length:
        return [(0, 0, length)]
    breaks = np.flatnonzero(np.diff(indices) != 1) + 1
    bounds = [0, *breaks.tolist(), len(indices)]
    runs = []
    for start, end in pairwise(bounds):
        if start < end:
            runs.append((start, int(indices[start]), end - start))
    return runs


@dataclass(frozen=True)
class ShardedTensor:
    """A parameter or buffer with its global name and shard. A copy has its tied tensor's name."""

    name: str
    tensor: Tensor
    shard: Shard
    is_parameter: bool
    is_copy: bool = False


def parameter_count(tensors: Iterable[ShardedTensor]) -> int:
    """Elements in the global parameters."""
    return sum(torch.Size(entry.shard.global_shape).numel() for entry in tensors if entry.is_parameter)
