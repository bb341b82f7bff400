"""Norms of the literature besides batch norm, cut by channel: for training spiking networks, and for single samples."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megasnn.again import once
from megasnn.kernels.torch_backend import REDUCED
from megasnn.layers.batch_norm import ParallelBatchNorm
from megasnn.layers.context import BuildContext, context_for
from megasnn.layers.initialisers import constant, ones, zeros
from megasnn.parallel.collectives import all_reduce_sum
from megasnn.parallel.sharding import Initialiser, declare_parameter
from megasnn.parallel_state import Group


class ThresholdDependentBatchNorm(ParallelBatchNorm):
    """Batch norm whose weight starts at alpha * v_threshold, so that potentials begin near the threshold (tdBN, Zheng
    et al. 2021, arXiv 2011.05280; SpikingJelly's ThresholdDependentBatchNorm).

    Args:
        alpha: 1, or 1 / sqrt(2) where two branches of a residual block are added.
        options: as of ParallelBatchNorm.
    """

    def __init__(
        self,
        channels: int,
        alpha: float = 1.0,
        v_threshold: float = 1.0,
        context: BuildContext | None = None,
        **options: Any,
    ) -> None:
        super().__init__(channels, context, **{"initialise": constant(alpha * v_threshold), **options})


class TemporalEffectiveBatchNorm(ParallelBatchNorm):
    """Batch norm with a learned factor for each time step, which all channels share (TEBN, Duan et al. 2022;
    SpikingJelly's TemporalEffectiveBatchNorm). Input of a single time step comes out at each of them.

    Args:
        initialise_scale: fills the factors; by default with ones.
        options: as of ParallelBatchNorm.
    Attributes:
        scale: the factors `[T]`. A rank sees the gradient of its own channels, which `partial_gradient` has summed.
    """

    scale: Tensor

    def __init__(
        self,
        channels: int,
        context: BuildContext | None = None,
        *,
        initialise_scale: Initialiser = ones,
        whole: bool = False,
        **options: Any,
    ) -> None:
        context = context_for(context)
        super().__init__(channels, context, whole=whole, **options)
        shard = context.shard((context.time_steps,), partial_gradient=not whole, initialise=initialise_scale)
        declare_parameter(self, "scale", shard, context.dtype)

    def forward(self, x: Tensor) -> Tensor:
        if len(x) not in (1, len(self.scale)):
            raise ValueError(f"this norm has factors for {len(self.scale)} time steps, and is given {len(x)}")
        y = super().forward(x)
        return y * self.scale.to(y.dtype).view(-1, *[1] * (y.ndim - 1))


class ParallelGroupNorm(nn.Module):
    """Normalises groups of channels of `[T, N, C_local, *space]`, each time step and sample by itself (nn.GroupNorm).

    A rank has whole groups. With as many groups as channels it is nn.InstanceNorm without running statistics.

    Args:
        channels: the global number. groups: the global number.
        initialise, initialise_bias: as of ParallelBatchNorm.
    Raises:
        ValueError: groups that do not divide the channels, or do not divide by the number of ranks.
    """

    weight: Tensor | None
    bias: Tensor | None
    mixes_rows = True

    def __init__(
        self,
        groups: int,
        channels: int,
        context: BuildContext | None = None,
        *,
        eps: float = 1e-5,
        affine: bool = True,
        initialise: Initialiser = ones,
        initialise_bias: Initialiser = zeros,
    ) -> None:
        super().__init__()
        context = context_for(context)
        if groups < 1 or channels % groups or groups % context.tensor.size:
            raise ValueError(
                f"groups {groups} of a group norm must divide its {channels} channels and be a multiple of "
                f"--tensor-model-parallel-size {context.tensor.size}"
            )
        self.groups, self.channels, self.eps = groups, channels, eps
        self._local_groups, self._local_channels = groups // context.tensor.size, channels // context.tensor.size
        for name, fill in (("weight", initialise), ("bias", initialise_bias)):
            self.register_parameter(name, None)
            if affine:
                declare_parameter(self, name, context.shard((channels,), 0, initialise=fill), context.dtype)

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[2] != self._local_channels:
            raise ValueError(f"a group norm of {self.channels} channels is given {x.shape[2]} on a rank")
        flat = x.flatten(0, 1)
        return F.group_norm(flat, self._local_groups, self.weight, self.bias, self.eps).unflatten(0, x.shape[:2])

    def extra_repr(self) -> str:
        return f"{self.groups}, {self.channels}, eps={self.eps}, affine={self.weight is not None}"


class ParallelLayerNorm(nn.Module):
    """Normalises over all channels, and over the dimensions behind them that are given (nn.LayerNorm): `[T, N,
    C_local]` or `[T, N, C_local, *space]`, or tokens `[T, N, L, C_local]`. The sums are taken over the ranks.

    Args:
        shape: the global sizes of the last dimensions, of which the first one is cut: (C,) or (C, *space).
        bias: whether there is a bias beside the weight.
        initialise, initialise_bias: as of ParallelBatchNorm.
    Raises:
        ValueError: channels that do not divide by the number of ranks.
    """

    weight: Tensor | None
    bias: Tensor | None
    mixes_rows = True

    def __init__(
        self,
        shape: int | tuple[int, ...],
        context: BuildContext | None = None,
        *,
        eps: float = 1e-5,
        affine: bool = True,
        bias: bool = True,
        initialise: Initialiser = ones,
        initialise_bias: Initialiser = zeros,
    ) -> None:
        super().__init__()
        context = context_for(context)
        self.shape, self.eps, self.group = (shape,) if isinstance(shape, int) else tuple(shape), eps, context.tensor
        if self.shape[0] % self.group.size:
            raise ValueError(
                f"the {self.shape[0]} channels of a layer norm do not divide by --tensor-model-parallel-size "
                f"{self.group.size}"
            )
        self._local_shape = (self.shape[0] // self.group.size, *self.shape[1:])
        for name, fill, has in (("weight", initialise, affine), ("bias", initialise_bias, affine and bias)):
            self.register_parameter(name, None)
            if has:
                declare_parameter(self, name, context.shard(self.shape, 0, initialise=fill), context.dtype)

    def forward(self, x: Tensor) -> Tensor:
        if tuple(x.shape[-len(self.shape) :]) != self._local_shape:
            raise ValueError(
                f"a layer norm over {list(self.shape)}, of which a rank has {list(self._local_shape)}, is given "
                f"{list(x.shape)}"
            )
        if x.is_meta:
            return torch.empty_like(x)
        if self.group.size == 1:
            return F.layer_norm(x, self.shape, self.weight, self.bias, self.eps)
        y = _Normalise.apply(x, len(self.shape), torch.Size(self.shape).numel(), self.eps, self.group)
        y = y if self.weight is None else y * self.weight.to(y.dtype)
        return y if self.bias is None else y + self.bias.to(y.dtype)

    def extra_repr(self) -> str:
        return f"{self.shape}, eps={self.eps}, affine={self.weight is not None}"


class _Normalise(torch.autograd.Function):
    """Subtracts the mean of the last `dims` dimensions, which the ranks share out, and divides by the deviation."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dims: int, count: int, eps: float, group: Group) -> Tensor:
        last = tuple(range(-dims, 0))
        values = x.float() if x.dtype in REDUCED else x

        def mean_of(each: Tensor) -> Tensor:
            return all_reduce_sum(each.sum(last, keepdim=True).contiguous(), group, "forward") / count

        mean = once(lambda: mean_of(values))
        centred = values - mean
        variance = once(lambda: mean_of(centred.square()))
        scale = (variance + eps).rsqrt()
        y = centred * scale
        ctx.last, ctx.count, ctx.group, ctx.dtype = last, count, group, x.dtype
        ctx.save_for_backward(y, scale)
        return y.to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None]:
        y, scale = ctx.saved_tensors
        grad = grad.to(y.dtype)
        sums = torch.stack([grad.sum(ctx.last, keepdim=True), (grad * y).sum(ctx.last, keepdim=True)])
        mean, along = all_reduce_sum(sums, ctx.group, "backward") / ctx.count
        return ((grad - mean - y * along) * scale).to(ctx.dtype), None, None, None, None
