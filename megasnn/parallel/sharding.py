"""The description every parameter and buffer carries: which part of which global tensor this rank holds.

Initial values, parameter counts, gradient norms, saving, loading and conversion read this description; nothing
matches on names. The idea of a tensor that knows its global shape and offset is Megatron-core's ``ShardedTensor``;
``blocks`` is what a fused q-k-v weight needs: it is cut inside each of its parts, by whole heads, not across them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import prod
from typing import TYPE_CHECKING, Any

from megasnn.grid import FLAG_OF_AXIS, HOLDING_AXES, Axis, Place

if TYPE_CHECKING:
    import torch
    from torch import Tensor

Initialiser = Callable[["Tensor", "torch.Generator"], object]


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
    if tensor.shape == sizes:  # nearly always
        return tensor
    if not sizes:  # a single number that a rank owns as one row
        return tensor.view(())
    for dim, (start, length) in enumerate(zip(offset, sizes, strict=True)):
        tensor = tensor.narrow(dim, start, length)
    return tensor


@dataclass(frozen=True)
class Cut:
    """How the ranks along one axis of the grid divide a tensor.

    Attributes:
        dim: the dimension that is cut into parts.
        blocks: that dimension consists of so many equal blocks, and each is cut by itself (3 for fused q, k, v).
        even: whether the parts must be equal; otherwise they are as `row_bounds` says.
    """

    dim: int
    blocks: int = 1
    even: bool = True

    def span(self, length: int, place: Place, axis: Axis) -> tuple[int, int]:
        """Where in each block of a dimension of this length the part of a rank begins, and how long it is."""
        own = own_rows(length // self.blocks, place.size(axis), place.index(axis))
        return own.start, len(own)


def row_bounds(rows: int, ranks: int) -> list[int]:
    """Where each rank's part of so many rows begins, and behind them the end. Parts differ by one row at most; the only
    row of all is the first rank's."""
    return [_row_bound(rows, ranks, rank) for rank in range(ranks + 1)]


def own_rows(rows: int, ranks: int, rank: int) -> range:
    """A rank's part of so many rows; what the other ranks have is not looked at."""
    return range(_row_bound(rows, ranks, rank), _row_bound(rows, ranks, rank + 1))


def _row_bound(rows: int, ranks: int, rank: int) -> int:
    return -(-rows * rank // ranks)


def nested_bounds(rows: int, sizes: Sequence[int]) -> list[int]:
    """`row_bounds` for ranks that lie along several axes of these sizes, the slowest first: those along an axis share
    out what the axes before it leave, as `Shard.by_rows` does, axis by axis."""
    bounds = [0, rows]
    for size in sizes:
        bounds = [first + each for first, last in pairwise(bounds) for each in row_bounds(last - first, size)[:-1]] + [
            rows
        ]
    return bounds


@dataclass(frozen=True)
class Shard:
    """Which part of a global tensor one rank holds, and which other ranks hold the same.

    Attributes:
        global_shape: shape of the whole tensor.
        cuts: by axis of the grid; along an axis without a cut all ranks hold the same. A later cut divides what the
            ones before it leave.
        place: the rank in the grid.
        partial_gradient: axes along which a rank's gradient covers only a share of a parameter that all hold, so that
            gradients must be summed over them (the time constant of a PLIF neuron, whose channels are cut).
        initialise: fills the *global* tensor from a generator keyed by the parameter's name.
    """

    global_shape: tuple[int, ...]
    cuts: tuple[tuple[Axis, Cut], ...] = ()
    place: Place = Place()
    partial_gradient: tuple[Axis, ...] = ()
    initialise: Initialiser | None = None

    def __post_init__(self) -> None:
        shape = self._shape_of_rows
        for axis, cut in self.cuts:
            size, length = self.place.size(axis), shape[cut.dim]
            if cut.even and length % (cut.blocks * size):
                raise ValueError(
                    f"dimension {cut.dim} of shape {list(shape)}, {cut.blocks} block(s) of "
                    f"{length // cut.blocks}, cannot be cut into {size} equal parts; "
                    f"choose a {FLAG_OF_AXIS[axis]} that divides it"
                )
            if axis in self.partial_gradient:
                raise ValueError("partial_gradient is for parameters that every rank along the axis holds whole")
            shape = self._shape_behind(shape, axis, cut)

    def __deepcopy__(self, memo: dict[int, Any]) -> Shard:
        return self  # with a copy of a module, not of whatever initialises it

    @property
    def _shape_of_rows(self) -> tuple[int, ...]:
        """A number that one of several ranks owns is a row of one."""
        return self.global_shape or (1,) * any(not cut.even for _, cut in self.cuts)

    def _shape_behind(self, shape: tuple[int, ...], axis: Axis, cut: Cut) -> tuple[int, ...]:
        """What a cut leaves of a shape on this rank."""
        _, length = cut.span(shape[cut.dim], self.place, axis)
        return _replaced(shape, cut.dim, cut.blocks * length)

    def is_cut(self, axis: Axis) -> bool:
        """Whether the ranks along an axis hold different parts."""
        return self.place.size(axis) > 1 and any(axis == other for other, _ in self.cuts)

    @property
    def shared_axes(self) -> tuple[Axis, ...]:
        """The axes along which other ranks hold what this one holds: the answer to who shares a tensor."""
        return tuple(axis for axis in HOLDING_AXES if self.place.size(axis) > 1 and not self.is_cut(axis))

    def is_primary(self, axes: Sequence[Axis] = HOLDING_AXES) -> bool:
        """True on exactly one of the ranks that hold the same and differ along `axes` only.

        What is counted or written once goes by this.
        """
        return all(self.place.index(axis) == 0 for axis in self.shared_axes if axis in axes)

    @property
    def part(self) -> tuple[tuple[Axis, int], ...]:
        """Which of the different parts this is, by axis; the same on all ranks that hold the same."""
        return tuple((axis, self.place.index(axis)) for axis in HOLDING_AXES if self.is_cut(axis))

    @property
    def local_shape(self) -> tuple[int, ...]:
        shape = self._shape_of_rows
        for axis, cut in self.cuts:
            shape = self._shape_behind(shape, axis, cut)
        return shape

    def pieces(self) -> list[Piece]:
        """The boxes that make up the local tensor: one per block. None where this rank owns no row."""
        if not self.global_shape:
            return [Piece((), (), ())] * prod(self.local_shape)
        zeros = (0,) * len(self.global_shape)
        pieces, shape = [Piece(zeros, zeros, self.global_shape)], self.global_shape
        for axis, cut in self.cuts:
            start, length = cut.span(shape[cut.dim], self.place, axis)
            block = shape[cut.dim] // cut.blocks
            starts = [number * block + start for number in range(cut.blocks)]
            pieces = [
                box
                for number, start in enumerate(starts)
                for piece in pieces
                for box in _within(piece, cut.dim, start, length, number * length)
            ]
            shape = _replaced(shape, cut.dim, cut.blocks * length)
        return pieces

    def by_rows(self, axis: Axis) -> Shard:
        """What this rank owns, where each of the ranks along an axis owns some rows (the slowest dimension) of what all
        of them hold."""
        if self.place.size(axis) == 1:
            return self  # nothing is shared out
        return replace(self, cuts=(*self.cuts, (axis, Cut(0, even=False))))

    def without(self, axes: Collection[Axis]) -> Shard:
        """Of what the ranks along some axes hold together."""
        return replace(self, cuts=tuple((axis, cut) for axis, cut in self.cuts if axis not in axes))

    def rows_of(self, place: Place) -> range:
        """Which rows the rank at a place owns, of those that a tensor parallel rank holds; a number is a row."""
        shared = self.without([axis for axis, cut in self.cuts if not cut.even]).local_shape
        rows = range(shared[0] if shared else 1)
        for axis, cut in self.cuts:
            if not cut.even:
                start, length = cut.span(len(rows), place, axis)
                rows = rows[start : start + length]
        return rows

    def whole(self, global_shape: tuple[int, ...] = ()) -> Shard:
        """Of another tensor at the same place, which every rank holds whole."""
        return Shard(global_shape, place=self.place)

    def cut(self, full: Tensor) -> Tensor:
        """This rank's part of a global tensor, as a copy of its own. Raises ValueError on another global shape."""
        if tuple(full.shape) != self.global_shape:
            raise ValueError(f"expected a global tensor of shape {list(self.global_shape)}, got {list(full.shape)}")
        local = full.new_empty(self.local_shape)
        for piece in self.pieces():
            piece.of_local(local).copy_(piece.of_global(full))
        return local


def _within(piece: Piece, dim: int, start: int, length: int, goes_to: int) -> Iterator[Piece]:
    """What of a piece lies in `length` from `start` along a dimension of the local tensor; it moves to `goes_to`."""
    offset, size = piece.local_offset[dim], piece.sizes[dim]
    first, last = max(start, offset), min(start + length, offset + size)
    if first < last or not size:
        yield Piece(
            _replaced(piece.local_offset, dim, goes_to + first - start),
            _replaced(piece.global_offset, dim, piece.global_offset[dim] + first - offset),
            _replaced(piece.sizes, dim, last - first),
        )


def _replaced(values: tuple[int, ...], dim: int, value: int) -> tuple[int, ...]:
    return values[:dim] + (value,) + values[dim + 1 :]
