"""Images whose rows ranks share out (`--context-parallel-cut rows`), and what layers do about it.

A tensor `[T, N, C, H, W]` that is cut by rows lies on each rank of a group as neighbouring rows of all its images. The
dry run sees whole images: a layer that mixes rows notes there how high its input is, and which rows a rank has follows
from that alone (`shared_rows`), so that residual branches fit each other. Rows travel packed by what they hold; their
gradients go back to the owner, dense, and are added there.

Where space is gone (a mean, a linear layer on whole images) every rank computes the same, and the first one counts: its
gradients are broadcast, and its share of the loss and of weight gradients is all.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from megasnn.kernels.spike_codec import Content, decode_into, encode, encoded_like
from megasnn.layers.context import BuildContext, context_for
from megasnn.layers.shape_inference import content_of, note_exchanges
from megasnn.parallel.collectives import Exchange, all_gather_into, all_reduce_sum, start_exchange
from megasnn.parallel.sharding import own_rows
from megasnn.parallel.traffic import statistics
from megasnn.parallel_state import Group
from megasnn.recompute import cached_collective, is_replaying

NO_ROW = -1
"""In the place of a row outside of the image, which is zero."""


def shared_rows(height: int, ranks: int) -> tuple[range, ...]:
    """The rows of images of some height that each rank has, wherever nothing else is said: as evenly as possible.

    Raises:
        ValueError: fewer rows than ranks.
    """
    if height < ranks:
        raise ValueError(
            f"there are {height} row(s) for {ranks} ranks: with --context-parallel-cut rows, --context-parallel-size "
            f"may be {height} at most here"
        )
    return tuple(own_rows(height, ranks, rank) for rank in range(ranks))


def rows_of(context: BuildContext) -> Group | None:
    """The ranks that share out rows; None where images are whole on every rank."""
    return context.cp if context.cut == "rows" and context.cp.size > 1 else None


def own_rows_of(frames: Tensor, context: BuildContext) -> Tensor:
    """This rank's rows of whole images `[T, N, C, H, W]`."""
    group = rows_of(context)
    if group is None:
        return frames
    own = shared_rows(frames.shape[3], group.size)[group.rank]
    return frames[:, :, :, own.start : own.stop]


@contextmanager
def one_height(layer: nn.Module) -> Iterator[None]:
    """Around the dry run of a layer: raises ValueError where it calls a module that moves rows with images of two
    heights, since the module knows for one height which rows move."""
    heights: dict[nn.Module, tuple[int, ...]] = {}

    def note(module: nn.Module, inputs: tuple[Any, ...]) -> None:
        height = inputs[0].shape[3:4]
        if (first := heights.setdefault(module, height)) != height:
            raise ValueError(
                f"this {type(module).__name__} is called with images of {first[0]} rows and of {height[0]}, which with "
                "--context-parallel-cut rows needs a module for each"
            )

    hooks = [each.register_forward_pre_hook(note) for each in layer.modules() if vars(each).get("_rows") is not None]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


# --- which rows go where


class Run(NamedTuple):
    """Rows that lie side by side both at their owner and where they are needed: the first of them at either, and how
    many."""

    owner: int
    first: int
    place: int
    length: int

    def squares(self, pool: int) -> range:
        """Rows, where they are needed, of squares of so many pixels that they belong to."""
        return range(self.place // pool, (self.place + self.length - 1) // pool + 1)


@dataclass(frozen=True)
class RowMove:
    """
    Attributes:
        owned: the rows of the image that each rank has.
        needed: the rows that each rank needs, in order; a row may come more than once, and be `NO_ROW`.
    """

    owned: tuple[range, ...]
    needed: tuple[tuple[int, ...], ...]

    @property
    def is_needed(self) -> bool:
        """Tells whether a rank needs anything else than it has."""
        return any(tuple(own) != needed for own, needed in zip(self.owned, self.needed, strict=True))

    def runs(self, to: int) -> tuple[Run, ...]:
        """Runs that a rank is given, its own rows among it."""
        return _runs(self.owned, self.needed[to])

    def rows(self, to: int, owner: int) -> int:
        """Number of rows that one rank gives to another."""
        return sum(run.length for run in self.runs(to) if run.owner == owner)


@lru_cache(maxsize=4096)
def _runs(owned: tuple[range, ...], needed: tuple[int, ...]) -> tuple[Run, ...]:
    runs: list[Run] = []
    for place, row in enumerate(needed):
        if row == NO_ROW:
            continue
        owner = next(rank for rank, rows in enumerate(owned) if row in rows)
        first, last = row - owned[owner].start, runs[-1] if runs else None
        if last and (last.owner, last.first + last.length, last.place + last.length) == (owner, first, place):
            runs[-1] = last._replace(length=last.length + 1)
        else:
            runs.append(Run(owner, first, place, 1))
    return tuple(runs)


@dataclass(frozen=True)
class Windows:
    """Windows along the height: how the rows of a layer's output follow from those of its input.

    Attributes:
        kernel, stride, dilation: along the height.
        before: rows of padding above an image.
        pool: average pooling of so many rows that comes first.
    """

    kernel: int = 1
    stride: int = 1
    dilation: int = 1
    before: int = 0
    pool: int = 1

    def inputs(self, outputs: range, height: int) -> tuple[int, ...]:
        """The rows of an image that some rows of its output are computed from; `NO_ROW` outside of it."""
        if not outputs:
            return ()
        pooled = height // self.pool
        first = outputs.start * self.stride - self.before
        last = (outputs.stop - 1) * self.stride - self.before + self.dilation * (self.kernel - 1)
        return tuple(
            row * self.pool + within if 0 <= row < pooled else NO_ROW
            for row in range(first, last + 1)
            for within in range(self.pool)
        )


def move_for(group: Group, height: int, outputs: tuple[range, ...], windows: Windows) -> RowMove | None:
    """Move of the input of a layer, of that height, to the ranks that compute those rows of its output; None where
    every rank has what it needs."""
    move = RowMove(shared_rows(height, group.size), tuple(windows.inputs(rows, height) for rows in outputs))
    return move if move.is_needed else None


def rows_to_pool(height: int, ranks: int) -> tuple[range, ...]:
    """The rows that each rank computes of what is max-pooled (3, stride 2, padding 1) right behind: those in the middle
    of its pooled rows' windows, the next ones, and of all ranks but the first the row above.

    So a rank forms all values of a window in the same way, and equal ones stay equal: a tie is broken as on one rank.
    """
    pooled = shared_rows((height + 1) // 2, ranks)
    return tuple(range(max(2 * rows.start - 1, 0), min(2 * rows.stop, height)) for rows in pooled)


# --- moving rows


def move_rows(x: Tensor, move: RowMove, group: Group, content: Content, pool: int = 1) -> Tensor:
    """Gives each rank the rows that it needs: `[T, N, C, own rows, W]` -> `[T, N, C, needed rows, W]`, channels last.

    Collective, forward and backward: every rank is to use its result, also where it has no rows.

    Args:
        pool: the result is average-pooled over squares of so many pixels, without overlap, and used in no other way:
            so that the gradients of a square are equal, and one of them travels.
    Raises:
        ValueError: another number of rows than this rank has.
    """
    if x.shape[3] != len(move.owned[group.rank]):
        raise ValueError(f"a rank that has the rows {move.owned[group.rank]} of each image is given {x.shape[3]}")
    moved: Tensor = _MoveRows.apply(x, move, group, content, pool)
    return moved


class _MoveRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, move: RowMove, group: Group, content: Content, pool: int) -> Tensor:
        ctx.move, ctx.group, ctx.pool = move, group, pool
        images, needed = x.movedim(2, -1), move.needed[group.rank]
        exchange = None if is_replaying() else _start_rows(images, move, group, content)
        shape = (*images.shape[:2], len(needed), *images.shape[3:])
        taken = images.new_zeros(shape) if NO_ROW in needed else images.new_empty(shape)
        for run in move.runs(group.rank):  # while others' travel
            if run.owner == group.rank:
                _rows(taken, run.place, run.length).copy_(_rows(images, run.first, run.length))
        parts = cached_collective(lambda: [] if exchange is None else exchange.wait())
        for owner in _others(group):
            runs = [run for run in move.runs(group.rank) if run.owner == owner]
            if runs:
                lengths = [run.length for run in runs]
                rows = taken.new_empty((*shape[:2], sum(lengths), *shape[3:]))
                decode_into(parts[owner], content, rows.view(-1, shape[-1]))
                for run, part in zip(runs, rows.split(lengths, dim=2), strict=True):
                    _rows(taken, run.place, run.length).copy_(part)
        return taken.movedim(-1, 2)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None]:
        """Adds this rank's own gradient first, and then those of others in their order."""
        move, group, pool = ctx.move, ctx.group, ctx.pool
        images = grad.movedim(2, -1)
        exchange = _start_gradients(images, move, group, pool)
        own = [run for run in move.runs(group.rank) if run.owner == group.rank]
        total = _own(images, own, len(move.owned[group.rank]))
        parts = exchange.wait()
        for rank in _others(group):
            _add_squares(total, parts[rank], _given(move, rank, group), pool)
        return total.movedim(-1, 2), None, None, None, None


def _start_rows(images: Tensor, move: RowMove, group: Group, content: Content) -> Exchange:
    """Starts sending others what they need of this rank's `[T, N, rows, W, C]`, packed. Collective."""
    outgoing = [encode(_joined(images, _given(move, to, group)), content, check=True) for to in _others(group)]
    sent = {to: len(each) for to, each in zip(_others(group), outgoing, strict=True)}
    return start_exchange(
        torch.cat(outgoing),
        [sent.get(rank, 0) for rank in range(group.size)],
        [_length(images, move.rows(group.rank, rank), content) for rank in range(group.size)],
        group,
        "forward",
    )


def _start_gradients(images: Tensor, move: RowMove, group: Group, pool: int = 1) -> Exchange:
    """Starts sending the gradients of what this rank was given, `[T, N, needed rows, W, C]`, to the owners, dense.
    Collective. Args: pool: as of `move_rows`."""
    runs = move.runs(group.rank)
    outgoing = [_squares(images, [run for run in runs if run.owner == owner], pool) for owner in _others(group)]
    sent = {owner: len(each) for owner, each in zip(_others(group), outgoing, strict=True)}
    one = images.shape[0] * images.shape[1] * (images.shape[3] // pool) * images.shape[4]  # row of squares
    return start_exchange(
        torch.cat(outgoing),
        [sent.get(rank, 0) for rank in range(group.size)],
        [one * sum(len(run.squares(pool)) for run in _given(move, rank, group)) for rank in range(group.size)],
        group,
        "backward",
    )


def _given(move: RowMove, to: int, group: Group) -> list[Run]:
    """Runs that this rank gives to one."""
    return [run for run in move.runs(to) if run.owner == group.rank]


def _own(images: Tensor, runs: Sequence[Run], length: int) -> Tensor:
    """Gradient of a rank's own rows, so many, from that of what it was given: a copy."""
    if [(run.first, run.length) for run in runs] == [(0, length)]:  # nearly always
        return _rows(images, runs[0].place, length).clone(memory_format=torch.contiguous_format)
    total = images.new_zeros((*images.shape[:2], length, *images.shape[3:]))
    for run in runs:
        _rows(total, run.first, run.length).add_(_rows(images, run.place, run.length))
    return total


def _others(group: Group) -> list[int]:
    return [rank for rank in range(group.size) if rank != group.rank]


def _rows(images: Tensor, first: int, length: int) -> Tensor:
    """Some rows of images `[T, N, rows, W, C]`."""
    return images.narrow(2, first, length)


def _joined(images: Tensor, runs: Sequence[Run]) -> Tensor:
    """Some rows as a flat tensor."""
    parts = [_rows(images, run.first, run.length) for run in runs]
    return torch.cat(parts, dim=2).reshape(-1) if parts else images.new_empty(0)


def _squares(images: Tensor, runs: Sequence[Run], pool: int) -> Tensor:
    """One value of each square of some rows `[T, N, rows, W, C]`, in which all values are equal, as a flat tensor."""
    columns = images.shape[3] // pool * pool
    rows = [slice(run.squares(pool).start * pool, run.squares(pool).stop * pool, pool) for run in runs]
    parts = [images[:, :, each, :columns:pool] for each in rows]
    return torch.cat(parts, dim=2).reshape(-1) if parts else images.new_empty(0)


def _add_squares(total: Tensor, values: Tensor, runs: Sequence[Run], pool: int) -> None:
    """Adds what `_squares` has given of some runs to the owner's rows."""
    lengths = [len(run.squares(pool)) for run in runs]
    width = total.shape[3] // pool
    of_runs = values.view(*total.shape[:2], sum(lengths), width, total.shape[4]).split(lengths, dim=2)
    for run, part in zip(runs, of_runs, strict=True):
        if pool > 1:
            part = part.repeat_interleave(pool, dim=2).repeat_interleave(pool, dim=3)
            part = _rows(part, run.place % pool, run.length)
        _rows(total, run.first, run.length)[:, :, :, : width * pool].add_(part)


def _length(images: Tensor, rows: int, content: Content) -> int:
    """Number of values of so many encoded rows of images."""
    values = images.shape[0] * images.shape[1] * rows * images.shape[3] * images.shape[4]
    return encoded_like(values, content, images.dtype, torch.device("meta")).numel()


# --- what every rank has whole


def alike(x: Tensor, group: Group) -> Tensor:
    """Values that are the same on every rank. Backward: the gradient of the first rank, on all of them."""
    return x if group.size == 1 else _Alike.apply(x, group)


def alike_images(x: Tensor, needed: tuple[range, ...], group: Group) -> Tensor:
    """Images `[T, N, C, H, W]` that are the same on every rank, which each needs the gradient of in some rows only.
    Backward: the gradient of the first rank in these rows; zeros in others."""
    return x if group.size == 1 else _AlikeImages.apply(x, needed, group)


def sum_alike(x: Tensor, group: Group) -> Tensor:
    """The sum over the ranks, which is then `alike`."""
    return alike(x if group.size == 1 else _Sum.apply(x, group, False), group)


def sum_for_each(x: Tensor, group: Group) -> Tensor:
    """The sum over the ranks, which each uses in its own way. Backward: the sum of their gradients."""
    return x if group.size == 1 else _Sum.apply(x, group, True)


def gather_rows(x: Tensor, owned: tuple[range, ...], group: Group, content: Content) -> Tensor:
    """Whole images `[T, N, C, H, W]`, from the rows that each rank has. Backward takes the gradient for that of
    everybody: what is computed from the result is to be `alike`."""
    return _GatherRows.apply(x, owned, group, content)


def sum_counts(own: Tensor, largest: int, group: Group) -> Tensor:
    """The sum over the ranks of whole numbers from 0 on, exact, without a gradient.

    A number travels in a byte where it is at most 255, and else in two.

    Args:
        largest: that the sum can be.
    Raises:
        ValueError: as `count_type`.
    """
    travels_in = count_type(largest)

    def gathered() -> Tensor:
        packed = own.to(travels_in).flatten()
        mine = packed.view(torch.uint8)
        statistics.record(group.name, "all_gather", "forward", (group.size - 1) * mine.nbytes)
        parts = all_gather_into(mine.new_empty(group.size * len(mine)), mine, group)
        total = parts[0].view(packed.dtype).to(own.dtype)
        for part in parts[1:]:
            total += part.view(packed.dtype)
        return total

    return cached_collective(gathered).view(own.shape)


def count_type(largest: int) -> torch.dtype:
    """The smallest type of numbers from 0 to `largest`. Raises ValueError for more than two bytes hold."""
    if largest >= 1 << 15:
        raise ValueError(f"sums of up to {largest} do not fit into the two bytes that they travel in, {2**15 - 1}")
    return torch.uint8 if largest < 1 << 8 else torch.int16


class _Alike(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        group, grad = ctx.group, grad.clone(memory_format=torch.contiguous_format)
        statistics.record(group.name, "broadcast", "backward", grad.nbytes * (group.rank > 0))
        dist.broadcast(grad, group.ranks[0], group=group.handle)
        return grad, None


class _AlikeImages(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, needed: tuple[range, ...], group: Group) -> Tensor:
        ctx.needed, ctx.group = needed, group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        group, is_first = ctx.group, ctx.group.rank == 0
        sizes = [0, *(grad[:, :, :, : len(rows)].numel() for rows in ctx.needed[1:])]
        outgoing = [grad[:, :, :, rows.start : rows.stop].reshape(-1) for rows in ctx.needed[1:]]
        exchange = start_exchange(
            torch.cat(outgoing) if is_first else grad.new_empty(0),
            sizes if is_first else [0] * group.size,
            [sizes[group.rank], *[0] * (group.size - 1)],
            group,
            "backward",
        )
        of_first, *_ = exchange.wait()
        if is_first:
            return grad, None, None
        own, rows = torch.zeros_like(grad), ctx.needed[group.rank]
        part = own[:, :, :, rows.start : rows.stop]
        part.copy_(of_first.view(part.shape))
        return own, None, None


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group, sums_gradients: bool) -> Tensor:
        ctx.group, ctx.sums_gradients = group, sums_gradients
        return cached_collective(
            lambda: all_reduce_sum(x.clone(memory_format=torch.contiguous_format), group, "forward")
        )

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        if ctx.sums_gradients:
            grad = all_reduce_sum(grad.clone(memory_format=torch.contiguous_format), ctx.group, "backward")
        return grad, None, None


class _GatherRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, owned: tuple[range, ...], group: Group, content: Content) -> Tensor:
        ctx.own = owned[group.rank]
        everything = tuple(row for rows in owned for row in rows)
        return move_rows(x, RowMove(owned, (everything,) * group.size), group, content)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return grad[:, :, :, ctx.own.start : ctx.own.stop], None, None, None


# --- layers


class WholeImages(nn.Module):
    """`[T, N, C_local, own rows, W]` -> `[T, N, C_local, H, W]` on every rank that shares the rows, for a layer that
    takes each pixel by itself; elsewhere images are whole already.

    What is computed from them, all of it the same on every rank, goes through `used`: gradients travel there, and so
    where the images have become small.
    """

    def __init__(self, context: BuildContext | None = None) -> None:
        super().__init__()
        self._rows, self._height, self._content = rows_of(context_for(context)), 0, Content.DENSE

    def forward(self, x: Tensor) -> Tensor:
        if self._rows is None:
            return x
        if x.is_meta:
            self._height, self._content = x.shape[3], content_of(x)
            shared_rows(self._height, self._rows.size)  # refuses fewer rows than ranks
            note_exchanges(self)
            return x
        return gather_rows(x, shared_rows(self._height, self._rows.size), self._rows, self._content)

    def used(self, x: Tensor, pool: int = 1) -> Tensor:
        """Hands on what was computed from the images: they themselves, or pooled over squares of so many pixels."""
        if self._rows is None or x.is_meta:
            return x
        owned = shared_rows(self._height, self._rows.size)
        needed = tuple(range(rows.start // pool, min(-(-rows.stop // pool), x.shape[3])) for rows in owned)
        return alike_images(x, needed, self._rows)


class MeanOverSpace(nn.Module):
    """`[T, N, C_local, *space]` -> `[T, N, C_local]`, the same on every rank that shares rows."""

    def __init__(self, context: BuildContext | None = None) -> None:
        super().__init__()
        self._rows, self._pixels = rows_of(context_for(context)), 0

    def forward(self, x: Tensor) -> Tensor:
        # With the channels last also in the gradient, which residual sums take their memory order from.
        pixels = x.movedim(2, -1).flatten(2, -2)
        if self._rows is None or x.is_meta:
            self._pixels = pixels.shape[2]  # in the dry run of whole images
            if self._rows is not None:
                note_exchanges(self, 1)
            return pixels.mean(dim=2)
        return sum_alike(pixels.sum(dim=2), self._rows) / self._pixels


class MaxPool(nn.Module):
    """Max pooling of 3 x 3 pixels, stride 2, padding 1: `[T, N, C_local, H, W]` -> `[T, N, C_local, H', W']`, where H'
    is H / 2, rounded up.

    A convolution whose potentials are pooled is made with `pooled_behind=True`: ties stay ties over a border of ranks.
    """

    def __init__(self, context: BuildContext | None = None) -> None:
        super().__init__()
        self._rows, self._content = rows_of(context_for(context)), Content.DENSE
        self._move: RowMove | None = None  # of all rows of this rank's windows

    def forward(self, x: Tensor) -> Tensor:
        """Raises ValueError for other dimensions."""
        if x.ndim != 5:
            raise ValueError(f"max_pool is for frames [T, N, C, H, W], got {list(x.shape)}")
        frames, padding = x.flatten(0, 1), (1, 1)
        if self._rows is not None and x.is_meta:
            height, ranks = x.shape[3], self._rows.size
            windows = tuple(tuple(rows) for rows in rows_to_pool(height, ranks))
            self._move, self._content = RowMove(shared_rows(height, ranks), windows), content_of(x)
            note_exchanges(self)
        elif self._rows is not None and self._move is not None:
            frames = move_rows(x, self._move, self._rows, self._content).flatten(0, 1)
            frames = F.pad(frames, (0, 0, int(self._rows.rank == 0), 1), value=-torch.inf)
            padding = (0, 1)
        return F.max_pool2d(frames, kernel_size=3, stride=2, padding=padding).unflatten(0, x.shape[:2])
