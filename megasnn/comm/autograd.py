"""A collective as an autograd function, beside its dual (Megatron-LM, arXiv 1909.08053, section 3, f and g)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megasnn.comm.codec import Wire
from megasnn.comm.collectives import gather_columns
from megasnn.comm.group import Group
from megasnn.comm.layout import from_rows, to_rows


class _GatherAlike(torch.autograd.Function):
    """Forward: channels of all ranks side by side. Backward: the gradient is whole on every rank, each keeps its part.

    For what all ranks go on with in the same way (a loss).
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group, ctx.channels = group, x.shape[2]
        if x.is_meta:
            return x.new_empty((*x.shape[:2], group.size * x.shape[2], *x.shape[3:]))
        full, _ = gather_columns(to_rows(x), group, Wire.DENSE)
        return from_rows(full, x.shape)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad.narrow(2, ctx.group.rank * ctx.channels, ctx.channels), None


class _OwnChannels(torch.autograd.Function):
    """Forward: each rank keeps its part of what all of them have whole. Backward: the parts' gradients side by side."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        channels = x.shape[2] // group.size
        return x.narrow(2, group.rank * channels, channels).clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        full, _ = gather_columns(to_rows(grad), ctx.group, Wire.DENSE, "backward")
        return from_rows(full, grad.shape), None


def own_channels(x: Tensor, group: Group) -> Tensor:
    """[T, N, C, *space], whole and the same on every rank -> [T, N, C/size, *space]."""
    return x if group.size == 1 else _OwnChannels.apply(x, group)


def gather_alike(x: Tensor, group: Group) -> Tensor:
    """[T, N, C/size, *space] -> [T, N, C, *space], for a result that every rank uses in the same way."""
    return x if group.size == 1 else _GatherAlike.apply(x, group)
