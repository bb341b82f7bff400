"""From images whose rows ranks share out to what all of these ranks have whole, and go on with in the same way.

What comes behind is computed on every rank, and counts on the first one: its gradients are those that everybody is
given, and its share of gradients of weights and of the loss is all, that of the others nothing.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megasnn.again import once
from megasnn.kernels.spike_codec import Content
from megasnn.parallel.collectives import all_gather_into, all_reduce_sum, start_exchange
from megasnn.parallel.rows import RowMove, move_rows
from megasnn.parallel.traffic import statistics
from megasnn.parallel_state import Group


def alike(x: Tensor, group: Group) -> Tensor:
    """What is the same on every rank. Backward: the gradient of the first rank, on all of them."""
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

    return once(gathered).view(own.shape)


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
        return once(lambda: all_reduce_sum(x.clone(memory_format=torch.contiguous_format), group, "forward"))

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
