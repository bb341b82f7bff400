"""Forward and backward of a convolution that is cut by channels: what is exchanged, what is computed, what is kept."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from megasnn.again import once
from megasnn.kernels.convolution import average_pool, average_pool_gradient, average_pool_of_bits, pooled_space
from megasnn.kernels.products import ConvolutionProducts
from megasnn.kernels.spike_codec import Content, encode, remember_bits
from megasnn.layers.weight_gradients import Leave
from megasnn.parallel.collectives import (
    all_reduce_sum,
    exchange_bytes,
    from_rows,
    gather_columns,
    join_columns,
    sum_and_scatter_columns,
    to_rows,
)
from megasnn.parallel_state import Group

SLICE_BYTES = 4 * 1024 * 1024  # on a CPU


@dataclass(frozen=True)
class ConvPlan:
    """What the forward and the backward of one convolution have in common."""

    group: Group
    gather: bool
    scatter: bool
    content: Content
    products: ConvolutionProducts
    pool: int
    whole: bool = False  # the input has all channels on every rank


class Convolve(torch.autograd.Function):
    """Keeps the packed input, one bit a spike, for the gradient of the weight, which backward leaves as a task. `bits`:
    the input, where it is packed already.

    Where that task runs at once, the input gradient is exchanged meanwhile.
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
    ) -> Tensor:
        rows = to_rows(x)
        if plan.gather:
            full, payloads = gather_columns(rows, plan.group, plan.content, bits=bits)
        else:
            full, payloads = rows, [encode(rows.reshape(-1), plan.content, check=True) if bits is None else bits]

        def output() -> Tensor:
            images = pooled_input(payloads, plan, x.shape, x.dtype, from_rows(full, x.shape))
            return plan.products.output(images, images_kernel(weight, x.dtype)).unflatten(0, x.shape[:2])

        def sums_of_own_channels() -> Tensor:
            y = output()
            return from_rows(sum_and_scatter_columns(to_rows(y), plan.group, "forward")(), y.shape)

        ctx.plan, ctx.leave, ctx.input_shape = plan, leave, x.shape
        ctx.save_for_backward(weight, *payloads)
        return once(sums_of_own_channels) if plan.scatter and plan.group.size > 1 else output()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, None, None, None, None, None]:
        weight, *payloads = ctx.saved_tensors
        plan: ConvPlan = ctx.plan
        grad_rows = to_rows(grad)
        if plan.scatter:
            grad_rows, _ = gather_columns(grad_rows, plan.group, Content.DENSE, "backward")
        grad_images = _as_images(grad_rows, grad.shape)
        finish = None
        if ctx.needs_input_grad[0]:
            kernel = images_kernel(weight, grad.dtype)
            finish = _start_input_gradient(grad_images, kernel, plan, pooled_space(ctx.input_shape[3:], plan.pool))
            if plan.whole:  # each rank has computed what its own output channels contribute
                all_reduce_sum(finish(), plan.group, "backward")
        if ctx.leave is not None:
            add = partial(_add_weight_gradient, plan, payloads, ctx.input_shape, grad_images)
            ctx.leave(add)
        grad_x = None if finish is None else unpooled(finish(), ctx.input_shape, plan.pool)
        return grad_x, None, None, None, None, None


def _add_weight_gradient(
    plan: ConvPlan, payloads: list[Tensor], input_shape: torch.Size, grad: Tensor, total: Tensor
) -> None:
    kernel, bits = images_kernel(total, total.dtype), _bits_of_images(payloads, plan)
    if bits is not None:
        shape = torch.Size((len(grad), *input_shape[2:]))
        if plan.products.add_weight_gradient_of_bits(kernel, grad, bits, shape):
            return
    plan.products.add_weight_gradient(kernel, grad, pooled_input(payloads, plan, input_shape, grad.dtype))


def pooled_input(
    payloads: list[Tensor], plan: ConvPlan, shape: torch.Size, dtype: torch.dtype, full: Tensor | None = None
) -> Tensor:
    """What is convolved, `[T*N, C, H, W]`, channels last, from the payloads that are kept.

    Args:
        shape: of the input that this rank has. full: the input with all channels, where it is there unpacked.
    """
    if plan.content is Content.SPIKES and len(payloads) == 1:
        images = average_pool_of_bits(payloads[0], torch.Size((shape[0] * shape[1], *shape[2:])), plan.pool, dtype)
        if images is not None:
            return images
    if full is None:
        rows = torch.Size((shape.numel() // shape[2], shape[2]))
        full = from_rows(join_columns(payloads, plan.content, rows, dtype), shape)
    return remember_bits(average_pool(full.flatten(0, 1), plan.pool), _bits_of_images(payloads, plan))


def _bits_of_images(payloads: list[Tensor], plan: ConvPlan) -> Tensor | None:
    """What is convolved as packed spikes, where that is what is kept and products may be formed of it."""
    is_kept = plan.content is Content.SPIKES and plan.pool == 1 and len(payloads) == 1
    return payloads[0] if is_kept and plan.products.sparse else None


def images_kernel(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """Two-dimensional, in the type that is computed in."""
    return (weight if weight.ndim == 4 else weight.unsqueeze(-1)).to(dtype)


def unpooled(rows: Tensor, shape: torch.Size, pool: int) -> Tensor:
    """Rows of the gradient of the pooled input as the gradient of the input, which has this `shape`."""
    if pool == 1:
        return from_rows(rows, shape)
    images = _as_images(rows, torch.Size((*shape[:3], *pooled_space(shape[3:], pool))))
    return average_pool_gradient(images, pool, shape[3:]).unflatten(0, shape[:2])


def _start_input_gradient(grad: Tensor, weight: Tensor, plan: ConvPlan, space: torch.Size) -> Callable[[], Tensor]:
    """Computes the input gradient and, where the input was gathered, starts summing it over the ranks.

    The returned function waits and gives this rank's rows. The exchange goes slice by slice of frames: each travels
    while the next one is computed, and what is in transit stays small.
    """
    if not plan.gather or plan.group.size == 1:
        whole = _image_rows(plan.products.input_gradient(grad, weight, space))
        return lambda: whole
    channels = weight.shape[1]
    frames, pixels = grad.shape[0], space.numel()
    slice_bytes = exchange_bytes(plan.group, grad.device, SLICE_BYTES)
    step = max(1, slice_bytes // (pixels * channels * grad.element_size()))
    result = grad.new_empty(frames * pixels, channels // plan.group.size)
    in_transit: deque[tuple[Tensor, Callable[[], Tensor]]] = deque()

    def finish(most: int = 0) -> Tensor:
        while len(in_transit) > most:
            place, arrived = in_transit.popleft()
            place.copy_(arrived())
        return result

    for start in range(0, frames, step):
        part = _image_rows(plan.products.input_gradient(grad[start : start + step], weight, space))
        place = result[start * pixels : start * pixels + len(part)]
        in_transit.append((place, sum_and_scatter_columns(part, plan.group, "backward")))
        finish(most=2)
    return finish


def _as_images(rows: Tensor, like: torch.Size) -> Tensor:
    """Rows as `[T*N, C, H, W]`, channels last; the first two and the spatial sizes are those of `like`."""
    return from_rows(rows, like).flatten(0, 1)


def _image_rows(images: Tensor) -> Tensor:
    """`[T*N, C, H, W]` as rows `[T*N*H*W, C]`."""
    return images.movedim(1, -1).reshape(-1, images.shape[1])
