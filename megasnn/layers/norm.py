"""Norms cut by channel: batch norm, whose running statistics are merged once per step over the global batch; those
of the literature on spiking networks; and norms of single samples."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megasnn.kernels.neuron import Shared
from megasnn.kernels.torch_backend import REDUCED, batch_norm
from megasnn.layers.context import BuildContext, context_for
from megasnn.layers.init import constant, ones, zeros
from megasnn.layers.shape_inference import calls_of, count_call, note_exchanges
from megasnn.parallel.sharding import Initialiser, declare_buffer, declare_parameter
from megasnn.parallel.sync_batch_norm import shared_over
from megasnn.recompute import cached_collective


class ParallelBatchNorm(nn.Module):
    """Normalises each channel of `[T, N, C_local, *space]` over time, samples and space (nn.BatchNorm's arithmetic).

    Every micro-batch is normalised by its own mean and biased variance. The running statistics are not touched by a
    forward: with `recording` on, it appends (mean, biased variance, values per channel) to `pending`, and
    `merge_running_statistics` turns the whole global batch's records into one update, or, where a forward of the model
    calls the norm several times, into one for each call. Recomputation, evaluation and profiling leave `recording` off.

    Args:
        channels: the global number; each rank holds `channels / size`.
        momentum: weight of the new statistics; None for the average over all steps.
        blocks: as in ParallelConv, for a norm after fused q, k, v.
        whole: every rank has all channels, of the same input.
        initialise, initialise_bias: fill the global weight and bias; by default with ones and zeros.
    Attributes:
        shared: the exchange between the ranks that share a micro-batch; None where no others do.
    """

    weight: Tensor | None
    bias: Tensor | None
    running_mean: Tensor | None
    running_var: Tensor | None
    num_batches_tracked: Tensor

    def __init__(
        self,
        channels: int,
        context: BuildContext | None = None,
        *,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        blocks: int = 1,
        whole: bool = False,
        initialise: Initialiser = ones,
        initialise_bias: Initialiser = zeros,
    ) -> None:
        super().__init__()
        context = context_for(context)
        self.time_steps, self.shared = context.time_steps, shared_over(context.cp)
        self._by_rows = context.cut == "rows"
        self.channels, self.eps, self.momentum = channels, eps, momentum
        self._local_channels = channels if whole else channels // context.tp.size
        self.recording = False
        self.pending: list[tuple[Tensor, Tensor, int | Tensor]] = []
        shard = partial(context.shard, (channels,), None if whole else 0, blocks)
        for name in ("weight", "bias"):
            self.register_parameter(name, None)
        for name in ("running_mean", "running_var"):
            self.register_buffer(name, None)
        if affine:
            declare_parameter(self, "weight", shard(initialise=initialise), context.dtype)
            declare_parameter(self, "bias", shard(initialise=initialise_bias), context.dtype)
        if track_running_stats:
            declare_buffer(self, "running_mean", shard(initialise=zeros), context.dtype)
            declare_buffer(self, "running_var", shard(initialise=ones), context.dtype)
            declare_buffer(self, "num_batches_tracked", context.shard((), initialise=zeros), torch.int64)

    @property
    def uses_batch_statistics(self) -> bool:
        return self.training or self.running_mean is None

    @property
    def calls(self) -> int:
        """Number of calls in a forward of the model."""
        return calls_of(self)

    def forward(self, x: Tensor) -> Tensor:
        if x.is_meta and x.shape[2] != self._local_channels:
            raise ValueError(
                f"a batch norm of {self.channels} channels, of which a rank has {self._local_channels}, is given "
                f"{x.shape[2]}"
            )
        if x.is_meta and x.ndim < 4 and self._by_rows:
            self.shared = None  # without space, all ranks have the same
        flat = x.flatten(0, 1)
        # A single time step stands for all of them: equal frames have the same mean and variance.
        repeats = self.time_steps if len(x) == 1 else 1
        if self.uses_batch_statistics and self.shared is not None and not x.is_meta:
            y, mean, variance, count = shared_batch_norm(flat, self.weight, self.bias, self.eps, self.shared)
            self.record(mean, variance, repeats * count)
        elif self.uses_batch_statistics:
            y = batch_norm(flat, None, self.weight, self.bias, self.eps)
            with torch.no_grad():
                wide = flat.float() if flat.dtype in REDUCED else flat  # the result has the type of the input
                variance, mean = torch.var_mean(wide, dim=[d for d in range(flat.ndim) if d != 1], correction=0)
            self.record(mean, variance, repeats * flat.numel() // flat.shape[1])
        else:
            assert self.running_mean is not None and self.running_var is not None
            y = batch_norm(flat, (self.running_mean, self.running_var), self.weight, self.bias, self.eps)
        return y.unflatten(0, x.shape[:2])

    def record(self, mean: Tensor, variance: Tensor, count: int | Tensor) -> None:
        """Keeps the statistics `[C_local]` of one call over `count` values a channel, if recording is on; the dry run
        counts the calls."""
        if mean.is_meta:
            count_call(self)
            if self.shared is not None:
                note_exchanges(self)
        if self.recording and self.running_mean is not None:
            self.pending.append((mean.detach(), variance.detach(), count))

    def extra_repr(self) -> str:
        return f"eps={self.eps}, momentum={self.momentum}, affine={self.weight is not None}"


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

        found, count = cached_collective(exchanged)
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
        if groups < 1 or channels % groups or groups % context.tp.size:
            raise ValueError(
                f"groups {groups} of a group norm must divide its {channels} channels and be a multiple of "
                f"--tensor-model-parallel-size {context.tp.size}"
            )
        self.groups, self.channels, self.eps = groups, channels, eps
        self._local_groups, self._local_channels = groups // context.tp.size, channels // context.tp.size
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
