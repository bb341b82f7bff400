"""Context parallelism by pixel rows (`--context-parallel-cut rows`): ranks exchange rows.

Each rank has neighbouring rows of all images `[T, N, C, H, W]`. In the dry run, which sees whole images, layers record
the height.
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
from megasnn.parallel.sharding import context_spans
from megasnn.parallel_state import Group


def divide_rows(height: int, ranks: int) -> tuple[range, ...]:
    """Each rank's rows, divided as evenly as possible. Raises ValueError for fewer rows than ranks."""
    # From the height alone, so residual branches fit each other.
    return context_spans(height, ranks, "row")


def own_pixel_rows(frames: Tensor, group: Group) -> Tensor:
    """This rank's pixel rows of whole images `[T, N, C, H, W]`."""
    own = divide_rows(frames.shape[3], group.size)[group.rank]
    return frames[:, :, :, own.start : own.stop]


def note_height(module: nn.Module, height: int) -> None:
    """Records the height of a module's images in the dry run. Raises ValueError for a second one."""
    found = facts(module)
    before = found.image_height
    if before not in (None, height):
        raise ValueError(
            f"this {type(module).__name__} is called with images of {before} rows and of {height}, which with "
            "--context-parallel-cut rows needs a module for each"
        )
    found.image_height = height


@dataclass(frozen=True)
class RowMove:
    """Exchange after which each rank has the rows it needs.

    Attributes:
        local_rows: each rank's rows before.
        needed: each rank's rows after; zeros above and below the image.
        height: rows in complete pooling windows. Later rows count as padding.
        pool: side of the average-pooling windows that follow.
    """

    local_rows: tuple[range, ...]
    needed: tuple[range, ...]
    height: int
    pool: int = 1

    def rows_for(self, owner: int, to: int) -> range:
        own = self.local_rows[owner]
        needed = self.needed[to]
        first = max(own.start, needed.start)
        stop = min(own.stop, needed.stop, self.height)
        return range(first, stop) if stop > first else range(0)

    def rows_to_exchange(self, rank: int) -> tuple[list[range], list[range]]:
        """Rows sent to, and received from, each rank."""
        sent = []
        received = []
        for other in range(len(self.local_rows)):
            sent.append(self.rows_for(rank, other))
            received.append(self.rows_for(other, rank))
        # A rank copies its own rows without an exchange.
        sent[rank] = range(0)
        received[rank] = range(0)
        return sent, received


def window_rows(outputs: range, kernel: int, stride: int, dilation: int, before: int, pool: int) -> range:
    """A convolution's input rows for output rows, with padding rows above and below the image.

    Args:
        before: padding rows above.
        pool: side of average-pooling windows before it.
    """
    first = outputs.start * stride - before
    last = (outputs.stop - 1) * stride - before + dilation * (kernel - 1)
    return range(first * pool, (last + 1) * pool)


def rows_to_pool(height: int, ranks: int) -> tuple[range, ...]:
    """Rows each rank computes for a max pool (3, stride 2, padding 1): its whole windows."""
    # One rank computes a whole window with the same kernels: equal values stay equal, and ties break as on one rank.
    pooled = divide_rows((height + 1) // 2, ranks)
    return tuple(range(max(2 * rows.start - 1, 0), min(2 * rows.stop, height)) for rows in pooled)


def move_rows(x: Tensor, move: RowMove, group: Group, content: Content) -> Tensor:
    """Exchanges rows: `[T, N, C, own rows, W]` -> `[T, N, C, needed rows, W]`, channels last.

    Collective in forward and backward: every rank must use its result. Raises ValueError for other rows.
    """
    local_rows = move.local_rows[group.rank]
    if x.shape[3] != len(local_rows):
        raise ValueError(f"a rank with rows {local_rows.start} to {local_rows.stop - 1} of each image got {x.shape[3]}")
    moved: Tensor = _MoveRows.apply(x, move, group, content)
    return moved


class _MoveRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, move: RowMove, group: Group, content: Content) -> Tensor:
        ctx.move = move
        ctx.group = group
        images = x.movedim(2, -1)
        local_rows = move.local_rows[group.rank]
        needed = move.needed[group.rank]
        sent, received = move.rows_to_exchange(group.rank)
        exchange: Exchange | None = None
        if not is_replaying():
            exchange = _start_rows(images, local_rows, sent, received, content, group)
        shape = (*images.shape[:2], len(needed), *images.shape[3:])
        result = images.new_empty(shape)
        # Rows outside of the image are zeros: they are the padding of a convolution.
        _rows(result, range(needed.start, min(0, needed.stop)), needed).zero_()
        _rows(result, range(max(needed.start, move.height), needed.stop), needed).zero_()
        # The own rows are copied during the exchange.
        own = move.rows_for(group.rank, group.rank)
        _rows(result, own, needed).copy_(_rows(images, own, local_rows))
        # A recomputed forward has no exchange: the cache holds the first forward's parts.
        parts = cached_collective(lambda: [] if exchange is None else exchange())
        for rows, part in zip(received, parts, strict=True):
            if rows:
                values = result.new_empty((*shape[:2], len(rows), *shape[3:]))
                decode_into(part, content, values.view(-1, shape[-1]))
                _rows(result, rows, needed).copy_(values)
        return result.movedim(-1, 2)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        move: RowMove = ctx.move
        group: Group = ctx.group
        images = grad.movedim(2, -1)
        local_rows = move.local_rows[group.rank]
        needed = move.needed[group.rank]
        received, sent = move.rows_to_exchange(group.rank)
        # Average pooling gives a window's pixels equal gradients: one of them is enough.
        windows = [_one_of_each_window(_rows(images, rows, needed), rows, move.pool).reshape(-1) for rows in sent]
        row_numel = images.shape[:2].numel() * (images.shape[3] // move.pool) * images.shape[4:].numel()
        arriving = []
        for rows in received:
            windows_of_rows = -(-rows.stop // move.pool) - rows.start // move.pool
            arriving.append(row_numel * windows_of_rows)
        exchange = start_exchange(torch.cat(windows), [len(each) for each in windows], arriving, group)
        total = images.new_empty((*images.shape[:2], len(local_rows), *images.shape[3:]))
        own = move.rows_for(group.rank, group.rank)
        if own != local_rows:
            total.zero_()
        # The own gradient first, then the other ranks' in rank order: a fixed order of sums.
        _rows(total, own, local_rows).copy_(_rows(images, own, needed))
        for rows, part in zip(received, exchange(), strict=True):
            if rows:
                _add_to_windows(_rows(total, rows, local_rows), part, rows, move.pool)
        return total.movedim(-1, 2), None, None, None


def _start_rows(
    images: Tensor, local_rows: range, sent: Sequence[range], received: Sequence[range], content: Content, group: Group
) -> Exchange:
    packed = []
    for rows in sent:
        if rows:
            packed.append(encode(_rows(images, rows, local_rows).reshape(-1), content, check=True))
        else:
            packed.append(encoded_like(0, content, images.dtype, images.device))
    row_numel = images.shape[:2].numel() * images.shape[3:].numel()
    # Only sizes are needed, which the meta device computes without memory.
    meta = torch.device("meta")
    arriving = [encoded_like(row_numel * len(rows), content, images.dtype, meta).numel() for rows in received]
    return start_exchange(torch.cat(packed), [len(each) for each in packed], arriving, group)


def _one_of_each_window(images: Tensor, rows: range, pool: int) -> Tensor:
    """One pixel per pooling window in `[T, N, rows, W, C]`."""
    # Rows before the first whole window belong to a window that begins on another rank.
    before = -rows.start % pool
    columns = images[:, :, :, : images.shape[3] // pool * pool : pool]
    return torch.cat([columns[:, :, : min(before, 1)], columns[:, :, before::pool]], dim=2)


def _add_to_windows(total: Tensor, part: Tensor, rows: range, pool: int) -> None:
    """Adds windows' gradients to all their pixels in `[T, N, rows, W, C]`."""
    width = total.shape[3] // pool
    windows = part.view(*total.shape[:2], -1, width, *total.shape[4:])
    pixels = windows.repeat_interleave(pool, 2).repeat_interleave(pool, 3)
    total[:, :, :, : width * pool].add_(pixels.narrow(2, rows.start % pool, len(rows)))


def _rows(images: Tensor, rows: range, present: range) -> Tensor:
    first = rows.start - present.start if rows else 0
    return images.narrow(2, first, len(rows))


def sum_for_each(x: Tensor, group: Group) -> Tensor:
    """Sum over ranks that each use it differently. Backward sums their gradients."""
    return x if group.size == 1 else _Sum.apply(x, group)


def sum_counts(own: Tensor, largest: int, group: Group) -> Tensor:
    """Exact sum over ranks for integers up to `largest`, without a gradient."""
    # Sends bytes if they suffice.
    content = Content.COUNTS if largest <= LARGEST_COUNT else Content.DENSE
    gathered, _ = gather_columns(own.reshape(1, -1), group, content)
    return gathered.view(group.size, *own.shape).sum(0)


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        # A copy, because the all-reduce writes into its argument.
        return cached_collective(lambda: all_reduce_sum(x.clone(memory_format=torch.contiguous_format), group))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return all_reduce_sum(grad.clone(memory_format=torch.contiguous_format), ctx.group), None


class WholeImages(nn.Module):
    """Gathers image rows: `[T, N, C_local, own rows, W]` -> `[T, N, C_local, H, W]`.

    For layers on whole images, such as flatten; your own must set `mixes_rows = False` (see `LayerTraits`). MegaSNN's
    convolutions and pooling may not follow: they exchange rows themselves. Returns the input for another cut.

    Args:
        pool: side of average-pooling windows that follow.
    """

    def __init__(self, pool: int = 1, context: BuildContext | None = None) -> None:
        super().__init__()
        self._row_group = context_for(context).row_group
        self._content = Content.DENSE
        self._pool = pool
        self._move: RowMove | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self._row_group is None:
            return x
        if x.is_meta:
            height = x.shape[3]
            ranks = self._row_group.size
            note_height(self, height)
            self._move = RowMove(divide_rows(height, ranks), (range(height),) * ranks, height, self._pool)
            self._content = content_of(x)
        if x.is_meta or self._move is None:
            return x
        return move_rows(x, self._move, self._row_group, self._content)


class MeanOverSpace(nn.Module):
    """Mean over space: `[T, N, C_local, *space]` -> `[T, N, C_local]`, equal on ranks that divide rows."""

    def __init__(self, context: BuildContext | None = None) -> None:
        super().__init__()
        self._row_group = context_for(context).row_group
        self._pixels = 0  # of whole images

    def forward(self, x: Tensor) -> Tensor:
        # Channels last also in the gradient, because residual sums take over its memory order.
        pixels = x.movedim(2, -1).flatten(2, -2)
        if self._row_group is not None and not x.is_meta:
            return sum_for_each(pixels.sum(dim=2), self._row_group) / self._pixels
        if self._row_group is not None:
            note_height(self, x.shape[3])
        self._pixels = pixels.shape[2]
        return pixels.mean(dim=2)


class MaxPool(nn.Module):
    """Max pooling, 3 x 3, stride 2, padding 1: `[T, N, C_local, H, W]` -> `[T, N, C_local, H', W']`.

    H' is H / 2, rounded up. A convolution before it needs `pooled_behind=True`.
    """

    def __init__(self, context: BuildContext | None = None) -> None:
        super().__init__()
        self._row_group = context_for(context).row_group
        self._content = Content.DENSE
        self._move: RowMove | None = None

    def forward(self, x: Tensor) -> Tensor:
        """Raises ValueError for other dimensions."""
        if x.ndim != 5:
            raise ValueError(f"max_pool is for frames [T, N, C, H, W], got {list(x.shape)}")
        frames = x.flatten(0, 1)
        padding = (1, 1)
        if self._row_group is not None and x.is_meta:
            height = x.shape[3]
            ranks = self._row_group.size
            note_height(self, height)
            self._move = RowMove(divide_rows(height, ranks), rows_to_pool(height, ranks), height)
            self._content = content_of(x)
        elif self._row_group is not None and self._move is not None:
            frames = move_rows(x, self._move, self._row_group, self._content).flatten(0, 1)
            # Rows of -inf stand for the outside of the image. The one below is used with an odd height only.
            frames = F.pad(frames, (0, 0, int(self._row_group.rank == 0), 1), value=-torch.inf)
            padding = (0, 1)
        return F.max_pool2d(frames, kernel_size=3, stride=2, padding=padding).unflatten(0, x.shape[:2])
