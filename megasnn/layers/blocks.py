"""Blocks of layers: convolution, norm, optional pooling and neuron as one unit, and what models repeat."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from megasnn.kernels import NeuronSpec
from megasnn.kernels.norm_neuron import BatchNorm, NormNeuron, norm_pool_neuron
from megasnn.layers.context import BuildContext, context_for
from megasnn.layers.conv import ParallelConv
from megasnn.layers.neuron import NeuronLayer, ParallelNeuron, make_neuron
from megasnn.layers.norm import ParallelBatchNorm
from megasnn.layers.row_context import MaxPool


class ConvNormNeuron(nn.Module):
    """(average pool) -> conv -> batch norm -> (max pool 3, stride 2, padding 1) -> neuron, on `[T, N, C_local, H, W]`.

    Input of a single time step `[1, N, C, H, W]` is shown at every step: convolution, norm and pool are computed once,
    which gives the same values and statistics as over the T equal frames.

    A convolution's bias cancels against the batch's mean: it is not added while the norm uses that, only counted in the
    mean, and its gradient is exactly zero.

    Args:
        in_channels, out_channels: global numbers.
        padding: None keeps height and width at stride 1.
        neuron: a description, or a layer of neurons of one's own (SpikingNeuron); None for the neuron of the context.
        norm: a norm of these `out_channels`; None for batch norm.
        average_pool: `pool` of the convolution. blocks, conv_options: as in ParallelConv.
    Attributes:
        fires: False while only the graph of a forward is wanted, and zeros do for spikes.
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: int = 1,
        context: BuildContext | None = None,
        *,
        padding: int | None = None,
        max_pool: bool = False,
        average_pool: int = 1,
        neuron: NeuronSpec | NeuronLayer | None = None,
        norm: nn.Module | None = None,
        blocks: int = 1,
        **conv_options: Any,
    ) -> None:
        super().__init__()
        context = context_for(context)
        fire = make_neuron(neuron, context)
        # Whether one call of a kernel computes norm, pooling and neuron, which then start at rest.
        self._is_fused = (
            (norm is None or type(norm).forward is ParallelBatchNorm.forward)
            and isinstance(fire, ParallelNeuron)
            and not context.stateful
            and not context.numerics.traceable
        )
        self.conv = ParallelConv(
            in_channels,
            out_channels,
            kernel_size,
            context,
            padding=kernel_size // 2 if padding is None else padding,
            pool=average_pool,
            pooled_behind=max_pool and not self._is_fused,
            row_above=max_pool and self._is_fused,
            blocks=blocks,
            **conv_options,
        )
        self.norm: nn.Module = norm or ParallelBatchNorm(out_channels, context, blocks=blocks)
        self.neuron, self.fires = fire, True
        self.max_pool = MaxPool(context) if max_pool else None

    def forward(self, x: Tensor) -> Tensor:
        norm, neuron = self.norm, self.neuron
        if not (self._is_fused and isinstance(norm, ParallelBatchNorm) and isinstance(neuron, ParallelNeuron)):
            y = norm(self.conv(x))
            return neuron(y if self.max_pool is None else self.max_pool(y))
        fixed = norm.fixed_statistics
        constant = self.conv.bias if fixed is None else None
        y = self.conv(x, add_bias=constant is None)
        above, y = self.conv.split_row_above(y)
        bias = norm.bias if norm.bias is None or constant is None else norm.bias + 0 * constant
        norm_neuron = NormNeuron(neuron.spec, norm.eps, pool=self.max_pool is not None, time_steps=neuron.steps_of(y))
        spikes, mean, variance, count = norm_pool_neuron(
            y,
            BatchNorm(norm.weight, bias, fixed, norm.shared),
            norm_neuron,
            neuron.w,
            above=above,
            backend=neuron.backend,
            fires=self.fires,
        )
        if fixed is None:
            # Equal frames change neither mean nor variance, but the unbiased variance counts all of them.
            mean = mean if constant is None else mean + constant.detach()
            norm.record(mean, variance, norm_neuron.time_steps // len(y) * count)
        return neuron.observed(spikes)


class NeuronConvNorm(nn.Module):
    """neuron -> conv -> batch norm: potentials `[T, N, C_in/size, H, W]` -> potentials `[T, N, C_out/size, H, W]`."""

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: int = 1,
        context: BuildContext | None = None,
        *,
        neuron: NeuronSpec | NeuronLayer | None = None,
        **conv_options: Any,
    ) -> None:
        super().__init__()
        context = context_for(context)
        self.neuron = make_neuron(neuron, context)
        options = {"padding": kernel_size // 2, **conv_options}
        self.conv = ParallelConv(in_channels, out_channels, kernel_size, context, **options)
        self.norm = ParallelBatchNorm(out_channels, context)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.conv(self.neuron(x)))


class ResidualMLP(nn.Module):
    """x + fc2(fc1(x)), pointwise over tokens: the second half of a block of Spikformer and of QKFormer."""

    def __init__(self, dim: int, hidden: int, **conv_options: Any) -> None:
        super().__init__()
        self.fc1 = ConvNormNeuron(dim, hidden, dims=1, **conv_options)
        self.fc2 = ConvNormNeuron(hidden, dim, dims=1, **conv_options)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.fc2(self.fc1(x))


class Residual(nn.Module):
    """x + inner(x)."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) + x
