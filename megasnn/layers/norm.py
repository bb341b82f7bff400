"""Batch norm sharded by channel. Running statistics change once a step, from the global batch."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn

from megasnn.common.recompute import is_replaying
from megasnn.kernels.torch_backend import batch_norm, computed_in
from megasnn.layers.context import BuildContext, context_for
from megasnn.layers.facts import facts
from megasnn.layers.init import ones, zeros
from megasnn.layers.row_context import sum_for_each
from megasnn.layers.tensors import declare
from megasnn.parallel.sharding import Initialiser
from megasnn.parallel.sync_batch_norm import SharedStatistics
from megasnn.parallel_state import Group


class ParallelBatchNorm(nn.Module):
    """Batch norm of `[T, N, C_local, *space]` over time, samples and space (nn.BatchNorm's arithmetic).

    Every micro-batch is normalised by its own mean and biased variance. With `record_statistics` a forward appends
    (mean, biased variance, values per channel) to `pending`; `RunningStatistics` makes one update a step from
    the global batch's records, for each call in a forward.

    Args:
        channels: global; each rank holds `channels / size`.
        momentum: weight of new statistics; None averages over all steps.
        blocks: as in ParallelConv, after fused q, k, v.
        initialise, initialise_bias: fill the global weight and bias; default ones and zeros.
    Attributes:
        shared: exchange between ranks that share a micro-batch; None without.
        pending: this step's records.
    """

    mixes_tokens = False  # ranks that divide tokens exchange their statistics
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
        initialise: Initialiser = ones,
        initialise_bias: Initialiser = zeros,
    ) -> None:
        super().__init__()
        context = context_for(context)
        self.channels = channels
        self.eps = eps
        self.momentum = momentum
        self.time_steps = context.time_steps
        self.shared: SharedStatistics | None = None
        if context.state.cp.size > 1:
            self.shared = SharedStatistics(context.state.cp)
        self.pending: list[tuple[Tensor, Tensor, int | Tensor]] = []
        self._is_recording = False
        self._by_rows = context.row_group is not None
        self._local_channels = channels // context.tp.size
        shard = partial(context.shard, (channels,), 0, blocks)
        for name in ("weight", "bias"):
            self.register_parameter(name, None)
        for name in ("running_mean", "running_var"):
            self.register_buffer(name, None)
        if affine:
            declare(self, "weight", shard(initialise=initialise), context.dtype)
            declare(self, "bias", shard(initialise=initialise_bias), context.dtype)
        if track_running_stats:
            declare(self, "running_mean", shard(initialise=zeros), context.dtype, is_parameter=False)
            declare(self, "running_var", shard(initialise=ones), context.dtype, is_parameter=False)
            declare(self, "num_batches_tracked", context.shard((), initialise=zeros), torch.int64, is_parameter=False)

    @property
    def fixed_statistics(self) -> tuple[Tensor, Tensor] | None:
        """Running mean and variance, for evaluation; None for the batch's own."""
        if self.training or self.running_mean is None or self.running_var is None:
            return None
        return self.running_mean, self.running_var

    @property
    def calls(self) -> int:
        return facts(self).calls

    def forward(self, x: Tensor) -> Tensor:
        if x.is_meta and x.shape[2] != self._local_channels:
            raise ValueError(
                f"a batch norm of {self.channels} channels takes {self._local_channels} on this rank, got {x.shape[2]}"
            )
        if x.is_meta and x.ndim < 4 and self._by_rows:
            # Without space the ranks that divide rows have equal values, and equal statistics.
            self.shared = None
        flat = x.flatten(0, 1)
        fixed = self.fixed_statistics
        if fixed is not None:
            return batch_norm(flat, fixed, self.weight, self.bias, self.eps).unflatten(0, x.shape[:2])
        count: int | Tensor = flat.numel() // flat.shape[1]
        if self.shared is not None and not x.is_meta:
            y, mean, variance, count = shared_batch_norm(flat, self.weight, self.bias, self.eps, self.shared.group)
        else:
            y = batch_norm(flat, None, self.weight, self.bias, self.eps)
            with torch.no_grad():
                # var_mean returns the type of its input, which may be too narrow for statistics.
                wide = flat.to(computed_in(flat))
                variance, mean = torch.var_mean(wide, dim=[d for d in range(flat.ndim) if d != 1], correction=0)
        # A single time step stands for all of them: equal frames have the same mean and variance.
        repeats = self.time_steps if len(x) == 1 else 1
        self.record(mean, variance, repeats * count)
        return y.unflatten(0, x.shape[:2])

    def record_statistics(self, is_on: bool = True) -> None:
        self._is_recording = is_on

    def record(self, mean: Tensor, variance: Tensor, count: int | Tensor) -> None:
        """Records one call's statistics `[C_local]`, over `count` values a channel. A dry run counts it."""
        if mean.is_meta:
            facts(self).count_call()
        # A recomputed forward has recorded its statistics before.
        if self._is_recording and self._buffers["running_mean"] is not None and not is_replaying():
            self.pending.append((mean.detach(), variance.detach(), count))


def shared_batch_norm(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, group: Group
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Batch norm with a group's joint statistics.

    Args:
        x: this rank's values `[N, C, ...]`. N may be 0.
    Returns:
        The normalised values; mean and biased variance `[C]`; values per channel.
    """
    values = x.to(computed_in(x))
    over = [dim for dim in range(x.ndim) if dim != 1]
    shape = (-1, *[1] * (x.ndim - 2))
    # In float64: the order of the sums depends on the layout, and a rounding at a threshold is another spike.
    own = values.new_full((1,), x.numel() // x.shape[1], dtype=torch.float64)
    sums = sum_for_each(torch.cat([values.sum(over, dtype=torch.float64), own]), group)
    count = sums[-1].detach()
    mean = (sums[:-1] / count).to(values.dtype)
    deviations = values - mean.view(shape)
    squares = sum_for_each(deviations.square().sum(over, dtype=torch.float64), group)
    variance = (squares / count).to(values.dtype)
    scale = (variance + eps).rsqrt()
    if weight is not None:
        scale = scale * weight
    y = deviations * scale.view(shape)
    if bias is not None:
        y = y + bias.view(shape)
    return y.to(x.dtype), mean, variance, count
