"""Batch normalisation of values that ranks share out, with the statistics of all of them."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megasnn.again import once
from megasnn.kernels.norm_neuron import Shared
from megasnn.kernels.reference import REDUCED


def shared_batch_norm(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, shared: Shared
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Normalises this rank's values `[N, C, ...]` of each channel; there may be none.

    Returns:
        what is normalised; mean and biased variance `[C]`, and over how many values a channel they were taken, of all
        ranks together.
    """
    y, mean, variance, count = _SharedBatchNorm.apply(x, weight, bias, eps, shared)
    return y, mean, variance, count


class _SharedBatchNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, shared: Shared
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        values, own = _wide(x), x.numel() // x.shape[1]

        def exchanged() -> tuple[Tensor, Tensor]:
            return shared.statistics(_statistics(values), own)

        found, count = once(exchanged)
        mean, variance = found.to(values.dtype).unbind()
        y = F.batch_norm(values, mean, variance, weight, bias, training=False, eps=eps) if own else values
        ctx.eps, ctx.shared = eps, shared
        ctx.save_for_backward(x, weight, found, count)
        ctx.mark_non_differentiable(mean, variance, count)
        return y.to(x.dtype), mean, variance, count

    @staticmethod
    def backward(ctx: Any, grad: Tensor, *_: None) -> tuple[Tensor | None, ...]:
        x, weight, found, count = ctx.saved_tensors
        mean, variance = found.unbind()
        precision = (variance + ctx.eps).reciprocal()
        values, g = _wide(x), _wide(grad)
        over = [dim for dim in range(x.ndim) if dim != 1]
        deviations = values - _of_channels(mean, values)
        sums = torch.stack([g.sum(over, dtype=torch.float64), (g * deviations).sum(over, dtype=torch.float64)])
        g_x = None
        if ctx.needs_input_grad[0]:
            means = ctx.shared.total(sums) / count
            g_x = g - _of_channels(means[0], g) - deviations * _of_channels(means[1] * precision, g)
            scale = precision.sqrt() if weight is None else precision.sqrt() * weight
            g_x = (g_x * _of_channels(scale, g)).to(x.dtype)
        _, need_weight, need_bias, *_ = ctx.needs_input_grad
        g_weight = (sums[1] * precision.sqrt()).to(weight.dtype) if need_weight else None
        return g_x, g_weight, sums[0].to(x.dtype if weight is None else weight.dtype) if need_bias else None, None, None


def _statistics(values: Tensor) -> Tensor:
    """Mean and biased variance of each channel, `[2, C]` in double precision; zeros where there are no values."""
    if not values.numel():
        return values.new_zeros((2, values.shape[1]), dtype=torch.float64)
    variance, mean = torch.var_mean(values, dim=[dim for dim in range(values.ndim) if dim != 1], correction=0)
    return torch.stack((mean, variance)).double()


def _wide(values: Tensor) -> Tensor:
    return values.float() if values.dtype in REDUCED else values


def _of_channels(values: Tensor, like: Tensor) -> Tensor:
    return values.to(like.dtype).view(-1, *[1] * (like.ndim - 2))
