"""Layer norm over channels that tensor-parallel ranks divide."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from megasnn.common.autograd import Function
from megasnn.kernels.spike_codec import Content
from megasnn.kernels.torch_backend import computed_in
from megasnn.layers.context import BuildContext, context_for
from megasnn.layers.init import ones, zeros
from megasnn.layers.tensors import declare
from megasnn.parallel.collectives import from_matrix, gather_columns, to_matrix
from megasnn.parallel.sharding import Initialiser
from megasnn.parallel_state import Group


class ParallelLayerNorm(nn.Module):
    """Layer norm of `[T, N, C_local, *space]` over all C channels, by nn.LayerNorm's rule.

    Each time step and place is normalised by itself. Ranks exchange two moments for each, forward and backward.
    Backward keeps the input and the moments.

    Args:
        channels: C, global; each rank holds `channels / size`.
        blocks: as in ParallelConv, after fused q, k, v.
        initialise, initialise_bias: fill the global weight and bias; default ones and zeros.
    Raises:
        ValueError: in the dry run, another number of channels.
    """

    mixes_tokens = False
    weight: Tensor
    bias: Tensor

    def __init__(
        self,
        channels: int,
        context: BuildContext | None = None,
        *,
        eps: float = 1e-5,
        blocks: int = 1,
        initialise: Initialiser = ones,
        initialise_bias: Initialiser = zeros,
    ) -> None:
        super().__init__()
        context = context_for(context)
        self.channels = channels
        self.eps = eps
        self._group = context.tp
        declare(self, "weight", context.shard((channels,), 0, blocks, initialise=initialise), context.dtype)
        declare(self, "bias", context.shard((channels,), 0, blocks, initialise=initialise_bias), context.dtype)

    def forward(self, x: Tensor) -> Tensor:
        if x.is_meta and x.shape[2] * self._group.size != self.channels:
            raise ValueError(f"a layer norm takes {self.channels} channels, got {x.shape[2] * self._group.size}")
        if x.is_meta:
            return torch.empty_like(x)
        if self._group.size == 1 and x.dtype == self.weight.dtype:
            places = x.movedim(2, -1)
            normalised: Tensor = torch.native_layer_norm(places, [self.channels], self.weight, self.bias, self.eps)[0]
            return normalised.movedim(-1, 2)
        rows: Tensor = _LayerNorm.apply(to_matrix(x), self.weight, self.bias, self.eps, self._group)
        return from_matrix(rows, x.shape)


class _LayerNorm(Function):
    """Layer norm of rows `[R, C/size]`, in float32 or wider."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor, bias: Tensor, eps: float, group: Group) -> Tensor:
        wide = rows.to(computed_in(rows))
        variance, mean = torch.var_mean(wide, dim=1, correction=0, keepdim=True)
        if group.size > 1:
            mean, variance = _combine_moments(mean, variance, group)
        scale = (variance + eps).rsqrt()
        ctx.group = group
        ctx.save_for_backward(rows, mean, scale, weight)
        y = torch.addcmul(bias, (wide - mean).mul_(scale), weight)
        return y.to(rows.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        rows, mean, scale, weight = ctx.saved_tensors
        group: Group = ctx.group
        normalised = (rows.to(mean.dtype) - mean).mul_(scale)
        wide = grad.to(mean.dtype)
        grad_weight = (wide * normalised).sum(0)
        grad_bias = wide.sum(0)
        grad_normalised = wide * weight
        sums = torch.stack([grad_normalised.sum(1), (grad_normalised * normalised).sum(1)], dim=1)
        if group.size > 1:
            gathered, _ = gather_columns(sums, group, Content.DENSE)
            sums = gathered.view(-1, group.size, 2).sum(1)
        sums /= rows.shape[1] * group.size
        grad_mean, grad_scale = sums.split(1, dim=1)
        grad_rows = (grad_normalised - grad_mean).addcmul_(normalised, grad_scale, value=-1).mul_(scale)
        return grad_rows.to(rows.dtype), grad_weight, grad_bias, None, None


def _combine_moments(mean: Tensor, variance: Tensor, group: Group) -> tuple[Tensor, Tensor]:
    """Mean and biased variance `[R, 1]` over all ranks' channels, from each rank's own."""
    gathered, _ = gather_columns(torch.cat([mean, variance], dim=1), group, Content.DENSE)
    means, variances = gathered.view(-1, group.size, 2).unbind(2)
    # Deviations from the joint mean, not a difference of squares: float32 would lose a small variance.
    deviation, joint = torch.var_mean(means, dim=1, correction=0, keepdim=True)
    return joint, variances.mean(1, keepdim=True) + deviation
