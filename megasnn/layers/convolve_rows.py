"""Forward and backward of a convolution of images whose rows ranks share out, where a rank's output has the rows of its
input.

A rank convolves its own rows as if the image ended with them. Meanwhile the rows above and below come from its
neighbours, packed; what they add to the outputs near the border is a convolution of these few rows with a part of the
kernel. Backward, their gradients are computed first, and travel while those of the rank's own rows are.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megasnn.comm.codec import encode
from megasnn.comm.collectives import from_rows, to_rows
from megasnn.comm.rows import add_gradients, put_rows, start_gradients, start_rows
from megasnn.kernels.pooling import average_pool, pooled_space
from megasnn.kernels.products import ConvolutionProducts
from megasnn.layers.convolve import ConvPlan, images_kernel, pooled_input, unpooled
from megasnn.layers.rows import Halo, Side
from megasnn.layers.weight_gradients import Leave


class ConvolveRows(torch.autograd.Function):
    """Keeps the packed rows, its own and others', for the gradient of the weight, which backward leaves as a task.

    Args: as of `megasnn.layers.convolve.Convolve`; no channels are cut.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        bits: Tensor | None,
        weight: Tensor,
        anchor: Tensor | None,
        leave: Leave | None,
        plan: ConvPlan,
        halo: Halo,
    ) -> Tensor:
        arrived = start_rows(x.movedim(2, -1), halo.move, halo.group, plan.content)
        rows = to_rows(x)
        payload = encode(rows.reshape(-1), plan.content, check=True) if bits is None else bits
        kernel = images_kernel(weight, x.dtype)
        images = pooled_input([payload], plan, x.shape, x.dtype, from_rows(rows, x.shape))
        y = plan.products.output(images, kernel)
        parts = arrived()
        images = _halo_rows(parts, plan, halo, x.shape, x.dtype)
        for side in halo.sides:
            _of(y, side.outputs).add_(_products(plan).output(_padded(images, side), _part(kernel, side)))
        ctx.plan, ctx.halo, ctx.leave, ctx.shape = plan, halo, leave, x.shape
        ctx.save_for_backward(weight, payload, *parts)
        return y.unflatten(0, x.shape[:2])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, None, None, None, None, None, None]:
        weight, payload, *parts = ctx.saved_tensors
        plan, halo, shape = ctx.plan, ctx.halo, ctx.shape
        grad_images = from_rows(to_rows(grad), grad.shape).flatten(0, 1)
        total = None
        if ctx.needs_input_grad[0]:
            total = _input_gradient(grad_images, images_kernel(weight, grad.dtype), plan, halo, shape)
        if ctx.leave is not None:
            ctx.leave(partial(_add_weight_gradient, plan, halo, payload, parts, shape, grad_images))
        grad_x = None if total is None else unpooled(total.reshape(-1, shape[2]), shape, plan.pool)
        return grad_x, None, None, None, None, None, None


def _input_gradient(grad: Tensor, kernel: Tensor, plan: ConvPlan, halo: Halo, shape: torch.Size) -> Tensor:
    """Of the pooled input, `[T, N, rows, W, C]`, with what others add to it: computed while that of others' rows, which
    comes first, travels. shape: of the input."""
    space = pooled_space(shape[3:], plan.pool)
    of_others = torch.cat([_halo_gradient(grad, kernel, plan, side, space[1]) for side in halo.sides], dim=2)
    exchange = start_gradients(of_others.unflatten(0, shape[:2]).movedim(2, -1), halo.pooled, halo.group)
    del of_others
    own = plan.products.input_gradient(grad, kernel, space)
    total = own.unflatten(0, shape[:2]).movedim(2, -1)
    add_gradients(total, exchange.wait(), halo.pooled, halo.group)
    return total


def _add_weight_gradient(
    plan: ConvPlan, halo: Halo, payload: Tensor, parts: list[Tensor], shape: torch.Size, grad: Tensor, total: Tensor
) -> None:
    images, kernel = pooled_input([payload], plan, shape, grad.dtype), images_kernel(total, total.dtype)
    plan.products.add_weight_gradient(kernel, grad, images)
    rows = _halo_rows(parts, plan, halo, shape, grad.dtype)
    for side in halo.sides:
        of_side = kernel.new_zeros(_of(kernel, side.kernel).shape)
        _products(plan).add_weight_gradient(of_side, _side_by_side(_of(grad, side.outputs)), _padded(rows, side))
        _of(kernel, side.kernel).add_(of_side)


def _halo_rows(parts: list[Tensor], plan: ConvPlan, halo: Halo, shape: torch.Size, dtype: torch.dtype) -> Tensor:
    """Neighbours' rows of the pooled input, `[frames, C, rows, W]`."""
    needed = len(halo.move.needed[halo.group.rank])
    rows = torch.empty((*shape[:2], needed, shape[4], shape[2]), dtype=dtype, device=parts[0].device)
    put_rows(rows, parts, halo.move, halo.group, plan.content)
    return average_pool(rows.flatten(0, 1).movedim(-1, 1), plan.pool)


def _halo_gradient(grad: Tensor, kernel: Tensor, plan: ConvPlan, side: Side, width: int) -> Tensor:
    """The gradient of one neighbour's rows, `[frames, C, rows, W]`."""
    rows = side.halo.stop - side.halo.start
    space = torch.Size((side.above + rows + side.below, width))
    padded = _products(plan).input_gradient(_side_by_side(_of(grad, side.outputs)), _part(kernel, side), space)
    return padded.narrow(2, side.above, rows)


def _products(plan: ConvPlan) -> ConvolutionProducts:
    """Of a convolution of neighbours' rows with a part of the kernel."""
    geometry = plan.products.geometry
    return replace(plan.products, geometry=replace(geometry, padding=(0, geometry.padding[1])))


def _padded(rows: Tensor, side: Side) -> Tensor:
    return _side_by_side(F.pad(_of(rows, side.halo), (0, 0, side.above, side.below)))


def _part(kernel: Tensor, side: Side) -> Tensor:
    return _of(kernel, side.kernel).contiguous()


def _of(images: Tensor, rows: slice) -> Tensor:
    return images[:, :, rows]


def _side_by_side(images: Tensor) -> Tensor:
    """With the channels last, and without gaps."""
    return images.contiguous(memory_format=torch.channels_last)
