"""The two ends of a chunk's graph: where inputs enter and hand back their gradients, and where gradients come in."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from megasnn.kernels.spike_codec import bits_of, remember_bits


class Entry(torch.autograd.Function):
    """The start of a chunk's graph: hands on its inputs and, in backward, their gradients, all at once; zeros for an
    input that nothing has learnt from.

    Leaves in its place would keep the dense inputs alive until backward, where the layers keep them packed.
    """

    @staticmethod
    def forward(
        ctx: Any, anchor: Tensor, deliver: Callable[[Sequence[Tensor]], None], *xs: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.deliver = deliver
        return tuple(x.view_as(x) for x in xs)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, ...]:
        ctx.deliver(gradients)
        return None, None, *(None for _ in gradients)


def without_graph(y: Tensor) -> Tensor:
    """An output of the same memory, which also knows its bits and needs a gradient or not."""
    return remember_bits(y.detach().requires_grad_(y.requires_grad), bits_of(y))


def backward_of(ys: Sequence[Tensor], take: Callable[[], Sequence[Tensor]]) -> Callable[[], None]:
    """The backward of a graph that ends in `ys`, which takes their gradients when it comes to that.

    Gradients that are given to backward live until it is over; those that are taken in it go when they are used up.
    """
    end: Tensor = _Exit.apply(take, *ys)
    return partial(torch.autograd.backward, get_gradient_edge(end), torch.zeros_like(end))


class _Exit(torch.autograd.Function):
    """The end of a chunk's graph: a zero, whose backward asks for the gradients of the outputs."""

    @staticmethod
    def forward(ctx: Any, take: Callable[[], Sequence[Tensor]], *ys: Tensor) -> Tensor:
        ctx.take = take
        return ys[0].new_zeros(())

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor | None, ...]:
        return None, *ctx.take()
