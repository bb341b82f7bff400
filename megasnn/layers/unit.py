"""Convolution, norm, optional pooling and neuron as one unit: the place where a fused kernel replaces the inside."""

from __future__ import annotations

from torch import Tensor, nn

from megasnn.kernels.unit import norm_pool_neuron
from megasnn.layers.batch_norm import ParallelBatchNorm
from megasnn.layers.conv import ParallelConv
from megasnn.layers.neuron import ParallelNeuron


class ConvNormNeuron(nn.Module):
    """conv -> batch norm -> (max pool 3, stride 2, padding 1) -> neuron, on `[T, N, C_local, H, W]`.

    With `time_steps`, the input is one frame `[1, N, C, H, W]` shown at every step: convolution, norm and pool are
    computed once, which gives the same values and statistics as over the T equal frames.

    A convolution's bias cancels against the batch's mean: it is not added while the norm uses that, only counted in the
    mean, and its gradient is exactly zero.

    Raises:
        ValueError: a neuron that carries its potential over: the fused unit always starts at rest.
    """

    def __init__(
        self,
        conv: ParallelConv,
        norm: ParallelBatchNorm,
        neuron: ParallelNeuron,
        *,
        pool: bool = False,
        time_steps: int | None = None,
    ) -> None:
        super().__init__()
        if neuron.carry_over:
            raise ValueError("a neuron with carry_over must stand alone: conv, norm and neuron as one start at rest")
        self.conv, self.norm, self.neuron = conv, norm, neuron
        self.pool, self.time_steps = pool, time_steps

    def forward(self, x: Tensor) -> Tensor:
        norm, neuron = self.norm, self.neuron
        constant = self.conv.bias if norm.uses_batch_statistics else None
        y = self.conv(x, add_bias=constant is None)
        steps = y.shape[0] if self.time_steps is None else self.time_steps
        spikes, mean, variance = norm_pool_neuron(
            y,
            norm.weight,
            norm.bias if norm.bias is None or constant is None else norm.bias + 0 * constant,
            norm.running_mean,
            norm.running_var,
            spec=neuron.spec,
            training=norm.uses_batch_statistics,
            eps=norm.eps,
            w=neuron.time_constant,
            pool=self.pool,
            time_steps=steps,
            backend=neuron.backend,
        )
        if norm.uses_batch_statistics:
            # Equal frames change neither mean nor variance, but the unbiased variance counts all of them.
            repeats = steps // y.shape[0]
            mean = mean if constant is None else mean + constant.detach()
            norm.record(mean, variance, repeats * y.numel() // y.shape[2])
        return neuron.observed(spikes)
