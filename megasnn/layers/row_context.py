"""Images whose rows ranks share out (`--context-parallel-cut rows`), and what layers do about it.

A tensor `[T, N, C, H, W]` that is cut by rows lies on each rank of a group as neighbouring rows of all its images. The
dry run sees whole images: a layer that mixes rows notes there how high its input is, and which rows a rank has follows
from that alone (`shared_rows`), so that residual branches fit each other. Rows travel packed by what they hold; their
gradients go back to the owner, dense, and are added there.

Where space is gone (a mean, a linear layer on whole images) every rank computes the same, and the first one counts: the
loss, and so the gradients, of the others are zeros (`BuildContext.counts_logits`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megasnn.common.recompute import cached_collective, is_replaying
from megasnn.kernels.spike_codec import Content, decode_into, encode, encoded_like
from megasnn.layers.context import BuildContext, context_for
from megasnn.layers.facts import facts
from megasnn.layers.shape_inference import LARGEST_COUNT, content_of
from megasnn.parallel.collectives import Exchange, all_reduce_sum, gather_columns, start_exchange
from megasnn.parallel.sharding import own_span
from megasnn.parallel_state import Group


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
    return tuple(own_span(height, [ranks], rank) for rank in range(ranks))


def row_group(context: BuildContext) -> Group | None:
    """The ranks that share out rows; None where images are whole on every rank."""
    return context.cp if context.cut == "rows" and context.cp.size > 1 else None


def own_pixel_rows(frames: Tensor, group: Group) -> Tensor:
    """This rank's rows of whole images `[T, N, C, H, W]`."""
    own = shared_rows(frames.shape[3], group.size)[group.rank]
    return frames[:, :, :, own.start : own.stop]


def note_height(module: nn.Module, height: int) -> None:
    """Notes in the dry run the height of images of which a module moves rows. Raises ValueError for a second one."""
    found = facts(module)
    before = found.image_height
    if before not in (None, height):
        raise ValueError(
            f"this {type(module).__name__} is called with images of {before} rows and of {height}, which with "
            "--context-parallel-cut rows needs a module for each"
        )
    found.image_height = height


# --- which rows go where


@dataclass(frozen=True)
class RowMove:
    """Neighbouring rows of images that each rank is given.

    Attributes:
        local_rows: the rows of the image that each rank has.
        needed: the rows that each rank needs; those above and below the image are zeros.
        height: number of rows of the image that are given; those from there on count as below it.
        pool: size of the windows that are averaged first, whose pixels have one gradient together: it travels once.
    """

    local_rows: tuple[range, ...]
    needed: tuple[range, ...]
    height: int
    pool: int = 1

    def rows_for(self, owner: int, to: int) -> range:
        """Rows that one rank gives to another, or has itself of those that it needs."""
        own, needed = self.local_rows[owner], self.needed[to]
        first, stop = max(own.start, needed.start), min(own.stop, needed.stop, self.height)
        return range(first, stop) if stop > first else range(0)

    def exchanged(self, rank: int) -> tuple[list[range], list[range]]:
        """Rows that a rank gives to each of the others, and rows that each of them gives to it."""
        ranks, nothing = range(len(self.local_rows)), range(0)
        gives = [nothing if other == rank else self.rows_for(rank, other) for other in ranks]
        return gives, [nothing if other == rank else self.rows_for(other, rank) for other in ranks]


def window_rows(outputs: range, kernel: int, stride: int, dilation: int, before: int, pool: int) -> range:
    """Rows of the input that some rows of a convolution's output are computed from, above and below the image too.

    Args:
        before: rows of padding above an image. pool: average pooling of so many rows that comes first.
    """
    first = outputs.start * stride - before
    last = (outputs.stop - 1) * stride - before + dilation * (kernel - 1)
    return range(first * pool, (last + 1) * pool)


def rows_to_pool(height: int, ranks: int) -> tuple[range, ...]:
    """The rows that each rank computes of what is max-pooled (3, stride 2, padding 1) right behind: those in the middle
    of its pooled rows' windows, the next ones, and of all ranks but the first the row above.

    So a rank forms all values of a window in the same way, and equal ones stay equal: a tie is broken as on one rank.
    """
    pooled = shared_rows((height + 1) // 2, ranks)
    return tuple(range(max(2 * rows.start - 1, 0), min(2 * rows.stop, height)) for rows in pooled)


# --- moving rows


def move_rows(x: Tensor, move: RowMove, group: Group, content: Content) -> Tensor:
    """Gives each rank the rows that it needs: `[T, N, C, own rows, W]` -> `[T, N, C, needed rows, W]`, channels last.

    Collective, forward and backward: every rank is to use its result.

    Raises:
        ValueError: another number of rows than this rank has.
    """
    if x.shape[3] != len(move.local_rows[group.rank]):
        raise ValueError(f"a rank that has the rows {move.local_rows[group.rank]} of each image is given {x.shape[3]}")
    moved: Tensor = _MoveRows.apply(x, move, group, content)
    return moved


class _MoveRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, move: RowMove, group: Group, content: Content) -> Tensor:
        ctx.move, ctx.group = move, group
        images, local_rows, needed = x.movedim(2, -1), move.local_rows[group.rank], move.needed[group.rank]
        sent, received = move.exchanged(group.rank)
        exchange = None if is_replaying() else _start_rows(images, local_rows, sent, received, content, group)
        shape = (*images.shape[:2], len(needed), *images.shape[3:])
        is_inside = needed.start >= 0 and needed.stop <= move.height
        result = images.new_empty(shape) if is_inside else images.new_zeros(shape)
        own = move.rows_for(group.rank, group.rank)
        _rows(result, own, needed).copy_(_rows(images, own, local_rows))  # while others' travel
        for rows, part in zip(received, cached_collective(lambda: [] if exchange is None else exchange()), strict=True):
            if rows:
                values = result.new_empty((*shape[:2], len(rows), *shape[3:]))
                decode_into(part, content, values.view(-1, shape[-1]))
                _rows(result, rows, needed).copy_(values)
        return result.movedim(-1, 2)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        """Adds this rank's own gradient first, and then those of others in their order."""
        move, group = ctx.move, ctx.group
        images, local_rows, needed = grad.movedim(2, -1), move.local_rows[group.rank], move.needed[group.rank]
        received, sent = move.exchanged(group.rank)
        windows = [_one_of_each_window(_rows(images, rows, needed), rows, move.pool).reshape(-1) for rows in sent]
        of_row = images.shape[:2].numel() * (images.shape[3] // move.pool) * images.shape[4:].numel()
        arriving = [of_row * (-(-rows.stop // move.pool) - rows.start // move.pool) for rows in received]
        exchange = start_exchange(torch.cat(windows), [len(each) for each in windows], arriving, group)
        total = images.new_zeros((*images.shape[:2], len(local_rows), *images.shape[3:]))
        own = move.rows_for(group.rank, group.rank)
        _rows(total, own, local_rows).copy_(_rows(images, own, needed))
        for rows, part in zip(received, exchange(), strict=True):
            if rows:
                _add_to_windows(_rows(total, rows, local_rows), part, rows, move.pool)
        return total.movedim(-1, 2), None, None, None


def _start_rows(
    images: Tensor, local_rows: range, sent: Sequence[range], received: Sequence[range], content: Content, group: Group
) -> Exchange:
    """Starts sending each rank its rows of this rank's images `[T, N, rows, W, C]`, packed."""
    of_row, meta = images.shape[:2].numel() * images.shape[3:].numel(), torch.device("meta")
    nothing = encoded_like(0, content, images.dtype, images.device)
    packed = [
        encode(_rows(images, rows, local_rows).reshape(-1), content, check=True) if rows else nothing for rows in sent
    ]
    arriving = [encoded_like(of_row * len(rows), content, images.dtype, meta).numel() for rows in received]
    return start_exchange(torch.cat(packed), [len(each) for each in packed], arriving, group)


def _one_of_each_window(images: Tensor, rows: range, pool: int) -> Tensor:
    """A pixel of each window of `pool` pixels square in images `[T, N, rows, W, C]`, which are those rows."""
    before = -rows.start % pool  # of a window that begins on another rank
    columns = images[:, :, :, : images.shape[3] // pool * pool : pool]
    return torch.cat([columns[:, :, : min(before, 1)], columns[:, :, before::pool]], dim=2)


def _add_to_windows(total: Tensor, part: Tensor, rows: range, pool: int) -> None:
    """Adds gradients of windows to all their pixels in images `[T, N, rows, W, C]`."""
    width = total.shape[3] // pool
    windows = part.view(*total.shape[:2], -1, width, *total.shape[4:])
    pixels = windows.repeat_interleave(pool, 2).repeat_interleave(pool, 3)
    total[:, :, :, : width * pool].add_(pixels.narrow(2, rows.start % pool, len(rows)))


def _rows(images: Tensor, rows: range, there: range) -> Tensor:
    """Some rows of images `[T, N, rows, W, C]` which are those `there`."""
    return images.narrow(2, rows.start - there.start if rows else 0, len(rows))


# --- sums over the ranks


def sum_for_each(x: Tensor, group: Group) -> Tensor:
    """The sum over the ranks, which each uses in its own way. Backward: the sum of their gradients."""
    return x if group.size == 1 else _Sum.apply(x, group)


def sum_counts(own: Tensor, largest: int, group: Group) -> Tensor:
    """The sum over the ranks of whole numbers, exact, without a gradient; in bytes where it can be no larger."""
    content = Content.COUNTS if largest <= LARGEST_COUNT else Content.DENSE
    of_all, _ = gather_columns(own.reshape(1, -1), group, content)
    return of_all.view(group.size, *own.shape).sum(0)


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return cached_collective(lambda: all_reduce_sum(x.clone(memory_format=torch.contiguous_format), group))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return all_reduce_sum(grad.clone(memory_format=torch.contiguous_format), ctx.group), None


# --- layers


class WholeImages(nn.Module):
    """`[T, N, C_local, own rows, W]` -> `[T, N, C_local, H, W]` on every rank that shares the rows, for a layer that
    takes whole images and moves no rows (flatten, linear); elsewhere images are whole already.

    One of your own still says `mixes_rows = False`. No convolution or pool of MegaSNN's may follow: it moves rows.

    Args:
        pool: average pooling that follows at once: then gradients travel one for each window.
    """

    def __init__(self, pool: int = 1, context: BuildContext | None = None) -> None:
        super().__init__()
        self._rows, self._content, self._pool = row_group(context_for(context)), Content.DENSE, pool
        self._move: RowMove | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self._rows is None:
            return x
        if x.is_meta:
            height, ranks = x.shape[3], self._rows.size
            note_height(self, height)
            self._move = RowMove(shared_rows(height, ranks), (range(height),) * ranks, height, self._pool)
            self._content = content_of(x)
        return x if x.is_meta or self._move is None else move_rows(x, self._move, self._rows, self._content)


class MeanOverSpace(nn.Module):
    """`[T, N, C_local, *space]` -> `[T, N, C_local]`, the same on every rank that shares rows."""

    def __init__(self, context: BuildContext | None = None) -> None:
        super().__init__()
        self._rows, self._pixels = row_group(context_for(context)), 0

    def forward(self, x: Tensor) -> Tensor:
        # With the channels last also in the gradient, which residual sums take their memory order from.
        pixels = x.movedim(2, -1).flatten(2, -2)
        if self._rows is not None and not x.is_meta:
            return sum_for_each(pixels.sum(dim=2), self._rows) / self._pixels
        if self._rows is not None:
            note_height(self, x.shape[3])
        self._pixels = pixels.shape[2]  # in the dry run of whole images
        return pixels.mean(dim=2)


class MaxPool(nn.Module):
    """Max pooling of 3 x 3 pixels, stride 2, padding 1: `[T, N, C_local, H, W]` -> `[T, N, C_local, H', W']`, where H'
    is H / 2, rounded up.

    A convolution in front of it is made with `pooled_behind=True`: ties stay ties over a border of ranks.
    """

    def __init__(self, context: BuildContext | None = None) -> None:
        super().__init__()
        self._rows, self._content = row_group(context_for(context)), Content.DENSE
        self._move: RowMove | None = None  # of all rows of this rank's windows

    def forward(self, x: Tensor) -> Tensor:
        """Raises ValueError for other dimensions."""
        if x.ndim != 5:
            raise ValueError(f"max_pool is for frames [T, N, C, H, W], got {list(x.shape)}")
        frames, padding = x.flatten(0, 1), (1, 1)
        if self._rows is not None and x.is_meta:
            height, ranks = x.shape[3], self._rows.size
            note_height(self, height)
            self._move = RowMove(shared_rows(height, ranks), rows_to_pool(height, ranks), height)
            self._content = content_of(x)
        elif self._rows is not None and self._move is not None:
            frames = move_rows(x, self._move, self._rows, self._content).flatten(0, 1)
            frames = F.pad(frames, (0, 0, int(self._rows.rank == 0), 1), value=-torch.inf)
            padding = (0, 1)
        return F.max_pool2d(frames, kernel_size=3, stride=2, padding=padding).unflatten(0, x.shape[:2])
