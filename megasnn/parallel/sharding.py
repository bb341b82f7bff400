"""Shards: which part of which global tensor a rank holds, declared by layers, read by everything else.

Initial values, parameter counts, gradient norms, saving, loading and conversion read this description; nothing matches
on names. The idea of a tensor that knows its global shape and offset is Megatron-core's ``ShardedTensor``; ``blocks``
is what a fused q-k-v weight needs: it is cut inside each of its parts, by whole heads, not across them.
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

from megasnn.common.grid import FLAG_OF_AXIS, HOLDING_AXES, Axis, Coordinates

Initialiser = Callable[[Tensor, torch.Generator], object]


@dataclass(frozen=True)
class Piece:
    """A box of a local tensor and where it lies in the global one. Offsets and sizes have one entry per dimension."""

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
    return tensor if sizes else tensor.view(())  # a single number may be owned as one row


@dataclass(frozen=True)
class Cut:
    """Division of a tensor by the ranks along one axis of the grid.

    Attributes:
        dim: the dimension that is cut into parts.
        blocks: that dimension consists of so many equal blocks, and each is cut by itself (3 for fused q, k, v).
        even: whether the parts must be equal; otherwise they are as `own_span` says.
    """

    dim: int
    blocks: int = 1
    even: bool = True


def own_span(rows: int, sizes: Sequence[int], index: int) -> range:
    """A rank's part of so many rows, in a time that does not grow with the ranks. Parts differ by one row at most; the
    only row of all is the first rank's.

    Args:
        sizes: of the axes that the ranks lie along, the slowest first: those along an axis share out what the axes
            before it leave, as `Shard.by_rows` does.
        index: of the rank among all of them.
    """
    start, ranks = 0, prod(sizes)
    for size in sizes:
        ranks //= size
        own, index = divmod(index, ranks)
        first, last = -(-rows * own // size), -(-rows * (own + 1) // size)
        start, rows = start + first, last - first
    return range(start, start + rows)


@dataclass(frozen=True)
class Shard:
    """Part of a global tensor that one rank holds, and the other ranks that hold the same.

    Attributes:
        global_shape: shape of the whole tensor.
        cuts: by axis of the grid; along an axis without a cut all ranks hold the same. A later cut divides what the
            ones before it leave.
        coordinates: the rank in the grid.
        partial_gradient: True where the gradient of a tensor parallel rank covers only a share of a parameter that all
            hold, so that they must be summed (the time constant of a PLIF neuron, whose channels are cut).
        initialise: fills the *global* tensor from a generator keyed by the parameter's name.

    Raises:
        ValueError: a dimension does not divide into equal parts, or is cut and has a `partial_gradient`.
    """

    global_shape: tuple[int, ...]
    cuts: tuple[tuple[Axis, Cut], ...] = ()
    coordinates: Coordinates = Coordinates()
    partial_gradient: bool = False
    initialise: Initialiser | None = None

    def __post_init__(self) -> None:
        if self.partial_gradient and any(axis == "tp" for axis, _ in self.cuts):
            raise ValueError("partial_gradient is for parameters that every tensor parallel rank holds whole")
        self._indices()

    def __deepcopy__(self, memo: dict[int, Any]) -> Shard:
        return self  # with a copy of a module, not of whatever initialises it

    def _indices(self) -> list[np.ndarray]:
        """Indices of the global tensor that this rank holds, along each dimension. A number that one of several ranks
        owns is a row of one."""
        shape = self.global_shape or (1,) * any(not cut.even for _, cut in self.cuts)
        indices = [np.arange(length) for length in shape]
        for axis, cut in self.cuts:
            size, length = self.coordinates.size(axis), len(indices[cut.dim])
            if cut.even and length % (cut.blocks * size):
                raise ValueError(
                    f"dimension {cut.dim} of shape {list(shape)}, {cut.blocks} block(s) of {length // cut.blocks}, "
                    f"cannot be cut into {size} equal parts; choose a {FLAG_OF_AXIS[axis]} that divides it"
                )
            blocks = indices[cut.dim].reshape(cut.blocks, -1)
            own = own_span(blocks.shape[1], [size], self.coordinates.index(axis))
            indices[cut.dim] = blocks[:, own.start : own.stop].reshape(-1)
        return indices

    def is_cut(self, axis: Axis) -> bool:
        """True where the ranks along an axis hold different parts."""
        return self.coordinates.size(axis) > 1 and any(axis == other for other, _ in self.cuts)

    @property
    def shared_axes(self) -> tuple[Axis, ...]:
        """The axes along which other ranks hold what this one holds: the answer to who shares a tensor."""
        return tuple(axis for axis in HOLDING_AXES if self.coordinates.size(axis) > 1 and not self.is_cut(axis))

    def is_primary(self) -> bool:
        """True on exactly one of the ranks that hold the same: what is counted or written once goes by this."""
        return all(self.coordinates.index(axis) == 0 for axis in self.shared_axes)

    @property
    def local_shape(self) -> tuple[int, ...]:
        return tuple(map(len, self._indices()))

    def pieces(self) -> list[Piece]:
        """The boxes that make up the local tensor, each as large as it can be. None where this rank owns no row."""
        if not self.global_shape:
            return [Piece((), (), ())] * prod(self.local_shape)
        along = map(_runs, self._indices(), self.global_shape)
        return [Piece(*zip(*box, strict=True)) for box in product(*along)]

    def by_rows(self, axis: Axis) -> Shard:
        """Part of this rank, where each of the ranks along an axis owns some rows (the slowest dimension) of what all
        of them hold."""
        if self.coordinates.size(axis) == 1:
            return self  # nothing is shared out
        return replace(self, cuts=(*self.cuts, (axis, Cut(0, even=False))))

    def cut(self, full: Tensor) -> Tensor:
        """This rank's part of a global tensor, as a copy of its own."""
        local = full.new_empty(self.local_shape)
        for piece in self.pieces():
            piece.of_local(local).copy_(piece.of_global(full))
        return local


def _runs(indices: np.ndarray, length: int) -> list[tuple[int, int, int]]:
    """Place among the indices, first index and length of each run of consecutive ones. Args: length: of all indices."""
    if len(indices) == length:  # nearly always
        return [(0, 0, length)]
    ends = [0, *(np.flatnonzero(np.diff(indices) != 1) + 1).tolist(), len(indices)]
    return [(a, int(indices[a]), b - a) for a, b in pairwise(ends) if a < b]


@dataclass(frozen=True)
class ShardedTensor:
    """A parameter or buffer of a built model with its global name and description.

    Attributes:
        is_copy: another one owns the value, and the name is that one's; see `tie`.
    """

    name: str
    tensor: Tensor
    shard: Shard
    is_parameter: bool
    is_copy: bool = False


def parameter_count(tensors: Iterable[ShardedTensor]) -> int:
    """Number of elements of the global parameters described, each counted once."""
    return sum(torch.Size(entry.shard.global_shape).numel() for entry in tensors if entry.is_parameter)
