"""Images whose rows ranks share out (`--context-parallel-cut rows`), and what layers do about it.

A tensor `[T, N, C, H, W]` that is cut by rows lies on each rank of a group as neighbouring rows of all its images. The
dry run sees whole images: a layer that mixes rows notes there how high its input is, and which rows a rank has follows
from that alone (`shared_rows`), so that residual branches fit each other. Rows travel packed by what they hold; their
gradients go back to the owner, dense, and are added there.

Where space is gone (a mean, a linear layer on whole images) every rank computes the same, and the first one counts: the
gradients of the others are zeros, and its share of the loss and of weight gradients is all.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megasnn.kernels.spike_codec import Content, decode_into, encode, encoded_like
from megasnn.layers.context import BuildContext, context_for
from megasnn.layers.shape_inference import content_of
from megasnn.parallel.collectives import Exchange, all_gather_into, all_reduce_sum, start_exchange
from megasnn.parallel.sharding import own_span
from megasnn.parallel.traffic import statistics
from megasnn.parallel_state import Group
from megasnn.recompute import cached_collective, is_replaying


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
    """Notes in the dry run the height of images of which a module moves rows. Raises ValueError for another one than
    before, since the module knows for one which rows move."""
    if (first := vars(module).setdefault("_noted_height", height)) != height:
        raise ValueError(
            f"this {type(module).__name__} is called with images of {first} rows and of {height}, which with "
            "--context-parallel-cut rows needs a module for each"
        )


# --- which rows go where


@dataclass(frozen=True)
class RowMove:
    """Neighbouring rows of images that each rank is given.

    Attributes:
        owned: the rows of the image that each rank has.
        needed: the rows that each rank needs; those above and below the image are zeros.
        height: number of rows of the image that are given; those from there on count as below it.
        pool: size of the windows that are averaged first, whose pixels have one gradient together.
        first_counts: the gradients of all ranks but the first are zeros, and do not travel.
    """

    owned: tuple[range, ...]
    needed: tuple[range, ...]
    height: int
    pool: int = 1
    first_counts: bool = False

    def given(self, owner: int, to: int) -> range:
        """Rows that one rank gives to another, or has itself of those that it needs."""
        own, needed = self.owned[owner], self.needed[to]
        first = max(own.start, needed.start)
        return range(first, max(first, min(own.stop, needed.stop, self.height)))

    def returned(self, owner: int, to: int) -> range:
        """Rows of which one rank gives the gradient back to their owner."""
        return range(0) if self.first_counts and to else self.given(owner, to)


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
    if x.shape[3] != len(move.owned[group.rank]):
        raise ValueError(f"a rank that has the rows {move.owned[group.rank]} of each image is given {x.shape[3]}")
    moved: Tensor = _MoveRows.apply(x, move, group, content)
    return moved


class _MoveRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, move: RowMove, group: Group, content: Content) -> Tensor:
        ctx.move, ctx.group = move, group
        images, needed = x.movedim(2, -1), move.needed[group.rank]
        exchange = None if is_replaying() else _start_rows(images, move, group, content)
        shape = (*images.shape[:2], len(needed), *images.shape[3:])
        is_inside = needed.start >= 0 and needed.stop <= move.height
        taken = images.new_empty(shape) if is_inside else images.new_zeros(shape)
        own = move.given(group.rank, group.rank)
        _rows(taken, own, needed).copy_(_rows(images, own, move.owned[group.rank]))  # while others' travel
        parts = cached_collective(lambda: [] if exchange is None else exchange())
        for owner in _others(group):
            if given := move.given(owner, group.rank):
                rows = taken.new_empty((*shape[:2], len(given), *shape[3:]))
                decode_into(parts[owner], content, rows.view(-1, shape[-1]))
                _rows(taken, given, needed).copy_(rows)
        return taken.movedim(-1, 2)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        """Adds this rank's own gradient first, and then those of others in their order."""
        move, group = ctx.move, ctx.group
        images, needed, owned = grad.movedim(2, -1), move.needed[group.rank], move.owned[group.rank]
        exchange = _start_gradients(images, move, group)
        total = images.new_zeros((*images.shape[:2], len(owned), *images.shape[3:]))
        own = move.given(group.rank, group.rank)
        _rows(total, own, owned).copy_(_rows(images, own, needed))
        parts = exchange()
        for rank in _others(group):
            _add_gradient(total, parts[rank], move, move.returned(group.rank, rank), owned)
        return total.movedim(-1, 2), None, None, None


def _start_rows(images: Tensor, move: RowMove, group: Group, content: Content) -> Exchange:
    """Starts sending others what they need of this rank's `[T, N, rows, W, C]`, packed."""
    sent, arriving = [0] * group.size, [0] * group.size
    outgoing = [images.new_empty(0, dtype=encoded_like(0, content, images.dtype, torch.device("meta")).dtype)]
    for rank in _others(group):
        rows = _rows(images, move.given(group.rank, rank), move.owned[group.rank])
        outgoing.append(encode(rows.reshape(-1), content, check=True))
        sent[rank] = len(outgoing[-1])
        values = len(move.given(rank, group.rank)) * images[:, :, 0].numel()
        arriving[rank] = encoded_like(values, content, images.dtype, torch.device("meta")).numel()
    return start_exchange(torch.cat(outgoing), sent, arriving, group, "forward")


def _start_gradients(images: Tensor, move: RowMove, group: Group) -> Exchange:
    """Starts sending the gradients of what this rank was given, `[T, N, needed rows, W, C]`, to the owners, dense, one
    of each window."""
    pool, needed = move.pool, move.needed[group.rank]
    of_row = images.shape[:2].numel() * (images.shape[3] // pool) * images.shape[4:].numel()
    columns = images[:, :, :, : images.shape[3] // pool * pool : pool]
    parts = list[Tensor]()
    for owner in _others(group):
        given = move.returned(owner, group.rank)
        aligned = range(-(-given.start // pool) * pool, given.stop)
        rows = _rows(columns, aligned, needed)[:, :, ::pool]
        if given and aligned.start > given.start:  # a window that begins on a rank before
            rows = torch.cat([_rows(columns, range(given.start, given.start + 1), needed), rows], 2)
        parts.append(rows.reshape(-1))
    sent = [of_row * len(_windows(move.returned(owner, group.rank), pool)) for owner in range(group.size)]
    arriving = [of_row * len(_windows(move.returned(group.rank, rank), pool)) for rank in range(group.size)]
    return start_exchange(torch.cat(parts), sent, arriving, group, "backward")


def _add_gradient(total: Tensor, part: Tensor, move: RowMove, given: range, owned: range) -> None:
    """Adds the gradient of rows that another rank was given."""
    if not given:
        return
    pool, rows = move.pool, _rows(total, given, owned)
    if pool == 1:
        rows.add_(part.view(rows.shape))
        return
    width = rows.shape[3] // pool
    windows = part.view(*rows.shape[:2], len(_windows(given, pool)), width, *rows.shape[4:])
    pixels = windows.repeat_interleave(pool, 2).repeat_interleave(pool, 3)
    rows[:, :, :, : width * pool].add_(pixels.narrow(2, given.start % pool, len(given)))


def _windows(rows: range, pool: int) -> range:
    """Windows of `pool` rows that some rows lie in."""
    return range(rows.start // pool, -(-rows.stop // pool)) if rows else rows


def _others(group: Group) -> list[int]:
    return [rank for rank in range(group.size) if rank != group.rank]


def _rows(images: Tensor, rows: range, there: range) -> Tensor:
    """Some rows of images `[T, N, rows, W, C]` which are those `there`."""
    return images.narrow(2, rows.start - there.start if rows else 0, len(rows))


# --- what every rank has whole


def first_counts(x: Tensor, group: Group) -> Tensor:
    """Values from which every rank computes the same. Backward: the gradient on the first rank, and zeros elsewhere."""
    return x if group.size == 1 else _FirstCounts.apply(x, group.rank)


def sum_for_each(x: Tensor, group: Group) -> Tensor:
    """The sum over the ranks, which each uses in its own way. Backward: the sum of their gradients."""
    return x if group.size == 1 else _Sum.apply(x, group)


def gather_rows(x: Tensor, height: int, group: Group, content: Content, pool: int = 1) -> Tensor:
    """Whole images `[T, N, C, H, W]` from the rows that each rank has, of which the first rank's count."""
    needed = (range(height),) * group.size
    move = RowMove(shared_rows(height, group.size), needed, height, pool, first_counts=True)
    return first_counts(move_rows(x, move, group, content), group)


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


class _FirstCounts(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, rank: int) -> Tensor:
        ctx.rank = rank
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad if ctx.rank == 0 else torch.zeros_like(grad), None


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return cached_collective(
            lambda: all_reduce_sum(x.clone(memory_format=torch.contiguous_format), group, "forward")
        )

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return all_reduce_sum(grad.clone(memory_format=torch.contiguous_format), ctx.group, "backward"), None


# --- layers


class WholeImages(nn.Module):
    """`[T, N, C_local, own rows, W]` -> `[T, N, C_local, H, W]` on every rank that shares the rows, for a layer that
    takes each pixel by itself; elsewhere images are whole already.

    Args:
        pool: average pooling that follows at once: then gradients travel one for each window.
    """

    def __init__(self, pool: int = 1, context: BuildContext | None = None) -> None:
        super().__init__()
        self._rows, self._height, self._content = row_group(context_for(context)), 0, Content.DENSE
        self._pool = pool

    def forward(self, x: Tensor) -> Tensor:
        if self._rows is None:
            return x
        if x.is_meta:
            self._height, self._content = x.shape[3], content_of(x)
            note_height(self, self._height)
            shared_rows(self._height, self._rows.size)  # refuses fewer rows than ranks
            return x
        return gather_rows(x, self._height, self._rows, self._content, self._pool)


class MeanOverSpace(nn.Module):
    """`[T, N, C_local, *space]` -> `[T, N, C_local]`, the same on every rank that shares rows."""

    def __init__(self, context: BuildContext | None = None) -> None:
        super().__init__()
        self._rows, self._pixels = row_group(context_for(context)), 0

    def forward(self, x: Tensor) -> Tensor:
        # With the channels last also in the gradient, which residual sums take their memory order from.
        pixels = x.movedim(2, -1).flatten(2, -2)
        if self._rows is not None and not x.is_meta:
            return first_counts(sum_for_each(pixels.sum(dim=2), self._rows), self._rows) / self._pixels
        if self._rows is not None:
            note_height(self, x.shape[3])
        self._pixels = pixels.shape[2]  # in the dry run of whole images
        return pixels.mean(dim=2)


class MaxPool(nn.Module):
    """Max pooling of 3 x 3 pixels, stride 2, padding 1: `[T, N, C_local, H, W]` -> `[T, N, C_local, H', W']`, where H'
    is H / 2, rounded up.

    A convolution whose potentials are pooled is made with `pooled_behind=True`: ties stay ties over a border of ranks.
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
