"""Convolution, norm, optional pooling and neuron as one unit: the place where a fused kernel replaces the inside."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from megasnn.kernels import NeuronSpec
from megasnn.kernels.neuron import norm_pool_neuron
from megasnn.kernels.spike_codec import Content
from megasnn.layers.batch_norm import ParallelBatchNorm
from megasnn.layers.context import BuildContext, context_for
from megasnn.layers.conv import ParallelConv, Style
from megasnn.layers.max_pool import MaxPool
from megasnn.layers.neuron import NeuronLayer, ParallelNeuron
from megasnn.parallel.sharding import Initialiser


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
        dims: 2 for frames, 1 for signals `[T, N, C_local, L]`.
        max_pool: whether there is the max pooling. average_pool: sides of the squares of the average pooling; 1 for
            none. It happens inside the convolution, so that what travels and is kept is the input's spikes.
        style, whole_input, content, blocks, groups, bias, pointwise, initialise, initialise_bias: as in ParallelConv.
    Attributes:
        fires: whether a forward gives spikes; not where only its graph is wanted, and zeros do.
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: int = 1,
        context: BuildContext | None = None,
        *,
        stride: int = 1,
        padding: int | None = None,
        groups: int = 1,
        bias: bool = False,
        dims: int = 2,
        pointwise: bool = False,
        max_pool: bool = False,
        average_pool: int = 1,
        neuron: NeuronSpec | NeuronLayer | None = None,
        norm: nn.Module | None = None,
        style: Style | None = None,
        whole_input: bool | None = None,
        content: Content | None = None,
        blocks: int = 1,
        initialise: Initialiser | None = None,
        initialise_bias: Initialiser | None = None,
    ) -> None:
        super().__init__()
        context = context_for(context)
        self.conv = ParallelConv(
            in_channels,
            out_channels,
            kernel_size,
            context,
            stride=stride,
            padding=kernel_size // 2 if padding is None else padding,
            groups=groups,
            bias=bias,
            dims=dims,
            pointwise=pointwise,
            pool=average_pool,
            pooled_behind=max_pool,
            style=style,
            whole_input=whole_input,
            content=content,
            blocks=blocks,
            initialise=initialise,
            initialise_bias=initialise_bias,
        )
        self.norm: nn.Module = norm or ParallelBatchNorm(out_channels, context, blocks=blocks)
        self.neuron = neuron if isinstance(neuron, NeuronLayer) else ParallelNeuron(neuron, context)
        self.max_pool = MaxPool(context, behind_pooled=True) if max_pool else None
        self.fires = True

    def forward(self, x: Tensor) -> Tensor:
        norm, neuron = self.norm, self.neuron
        if (  # not what the fused kernels compute, which start at rest
            not isinstance(norm, ParallelBatchNorm)
            or type(norm).forward is not ParallelBatchNorm.forward
            or not isinstance(neuron, ParallelNeuron)
            or neuron.carries
        ):
            y = norm(self.conv(x))
            return neuron(y if self.max_pool is None else self.max_pool(y))
        constant = self.conv.bias if norm.uses_batch_statistics else None
        y = self.conv(x, add_bias=constant is None)
        steps = neuron.steps_of(y)
        y, above = (y, None) if self.max_pool is None else self.max_pool.above(y)
        spikes, mean, variance, count = norm_pool_neuron(
            y,
            norm.weight,
            norm.bias if norm.bias is None or constant is None else norm.bias + 0 * constant,
            norm.running_mean,
            norm.running_var,
            spec=neuron.spec,
            training=norm.uses_batch_statistics,
            eps=norm.eps,
            w=neuron.w,
            pool=self.max_pool is not None,
            time_steps=steps,
            backend=neuron.backend,
            fires=self.fires,
            shared=norm.shared,
            above=above,
        )
        if norm.uses_batch_statistics:
            # Equal frames change neither mean nor variance, but the unbiased variance counts all of them.
            repeats = steps // y.shape[0]
            mean = mean if constant is None else mean + constant.detach()
            norm.record(mean, variance, repeats * count)
        return neuron.observed(spikes)


class PooledUnit(ConvNormNeuron):
    """A unit with max pooling (3, stride 2, padding 1) behind its neurons, which leaves spikes spikes.

    Args: as of ConvNormNeuron.
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: int = 1,
        context: BuildContext | None = None,
        **options: Any,
    ) -> None:
        super().__init__(in_channels, out_channels, kernel_size, context, **options)
        self._pooling_behind = MaxPool(context)

    def forward(self, x: Tensor) -> Tensor:
        return self._pooling_behind(super().forward(x))


class NeuronConvNorm(nn.Module):
    """neuron -> conv -> batch norm: potentials `[T, N, C_in/size, H, W]` -> potentials `[T, N, C_out/size, H, W]`.

    Args: as of ConvNormNeuron.
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: int = 1,
        context: BuildContext | None = None,
        *,
        bias: bool = False,
        neuron: NeuronSpec | NeuronLayer | None = None,
        initialise: Initialiser | None = None,
    ) -> None:
        super().__init__()
        context = context_for(context)
        self.neuron = neuron if isinstance(neuron, NeuronLayer) else ParallelNeuron(neuron, context)
        padding = kernel_size // 2
        self.conv = ParallelConv(
            in_channels, out_channels, kernel_size, context, padding=padding, bias=bias, initialise=initialise
        )
        self.norm = ParallelBatchNorm(out_channels, context)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.conv(self.neuron(x)))


class ResidualMLP(nn.Module):
    """x + fc2(fc1(x)), pointwise over tokens: the second half of a block of Spikformer and of QKFormer.

    Args:
        dim, hidden: the global numbers of channels.
        bias, initialise: as of ConvNormNeuron.
    """

    def __init__(self, dim: int, hidden: int, *, bias: bool = False, initialise: Initialiser | None = None) -> None:
        super().__init__()
        self.fc1 = ConvNormNeuron(dim, hidden, pointwise=True, bias=bias, initialise=initialise)
        self.fc2 = ConvNormNeuron(hidden, dim, pointwise=True, bias=bias, initialise=initialise)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.fc2(self.fc1(x))


class Residual(nn.Module):
    """x + inner(x)."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) + x
