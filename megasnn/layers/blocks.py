"""Building blocks: convolution, norm, pooling and neuron in one module, and residual blocks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from megasnn.kernels import NeuronSpec
from megasnn.kernels.norm_neuron import BatchNorm, NormNeuron, norm_pool_neuron
from megasnn.kernels.norm_neuron_kernels import NeuronUse
from megasnn.layers.bispike import ParallelBiSpike
from megasnn.layers.context import BuildContext, context_for
from megasnn.layers.conv import ParallelConv
from megasnn.layers.neuron import NeuronLayer, ParallelNeuron, make_neuron
from megasnn.layers.norm import ParallelBatchNorm
from megasnn.layers.row_context import MaxPool


class ConvNormNeuron(nn.Module):
    """(average pool) -> conv -> batch norm -> (max pool 3, stride 2, padding 1) -> neuron.

    On `[T, N, C_local, H, W]`.
    A single time step `[1, N, C, H, W]` is repeated: convolution, norm and pooling run once, as for T equal frames.

    Args:
        in_channels, out_channels: global.
        padding: None keeps height and width at stride 1.
        neuron: a description or a layer; None for the context's neuron.
        norm: for `out_channels` channels; None for batch norm.
        average_pool: `pool` in ParallelConv.
        blocks, conv_options: as in ParallelConv.
    Attributes:
        is_fused: one kernel call computes norm, pooling and neuron.
    """

    mixes_tokens = False

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
        neuron_layer = make_neuron(neuron, context)
        has_batch_norm = norm is None or type(norm).forward is ParallelBatchNorm.forward
        self.is_fused = (
            has_batch_norm
            and isinstance(neuron_layer, ParallelNeuron)
            # A fused neuron starts at rest: it has no state.
            and not context.stateful
            and not context.numerics.traceable
        )
        self._without_spikes = False
        self._norm_neurons: dict[tuple[int, float, int], NormNeuron] = {}  # by time steps, the norm's eps, rows above
        if padding is None:
            padding = kernel_size // 2
        # In the order of computation, which is the order of the parameters.
        self.conv = ParallelConv(
            in_channels,
            out_channels,
            kernel_size,
            context,
            padding=padding,
            pool=average_pool,
            pooled_behind=max_pool and not self.is_fused,
            row_above=max_pool and self.is_fused,
            blocks=blocks,
            **conv_options,
        )
        self.norm: nn.Module = norm or ParallelBatchNorm(out_channels, context, blocks=blocks)
        self.neuron = neuron_layer
        self.max_pool = MaxPool(context) if max_pool else None

    def forward(self, x: Tensor) -> Tensor:
        # From their table: nn.Module finds an attribute by a call of Python.
        norm = self._modules["norm"]
        neuron = self._modules["neuron"]
        # A part may be replaced after construction.
        if self.is_fused and isinstance(norm, ParallelBatchNorm) and isinstance(neuron, ParallelNeuron):
            return self._fused(x, norm, neuron)
        return self._one_by_one(x)

    def _one_by_one(self, x: Tensor) -> Tensor:
        y = self.norm(self.conv(x))
        if self.max_pool is not None:
            y = self.max_pool(y)
        return self.neuron(y)

    def _fused(self, x: Tensor, norm: ParallelBatchNorm, neuron: ParallelNeuron) -> Tensor:
        # Parameters, too, come from their tables.
        conv = self._modules["conv"]
        assert isinstance(conv, ParallelConv)
        fixed = norm.fixed_statistics
        weight = norm._parameters["weight"]
        bias: Tensor | None = norm._parameters["bias"]
        # Batch statistics cancel the convolution's bias: it enters the recorded mean only, and its gradient is zero.
        cancelled_bias = conv._parameters["bias"] if fixed is None else None
        if bias is not None and cancelled_bias is not None:
            # As in torch, that gradient is zeros and not None.
            bias = bias + 0 * cancelled_bias
        y = conv(x, add_bias=cancelled_bias is None)
        # The dry run sees whole images.
        above = 0 if y.is_meta else int(conv.has_row_above)
        steps = neuron.steps_of(y)
        norm_neuron = self._norm_neurons.get((steps, norm.eps, above))
        if norm_neuron is None:
            norm_neuron = NormNeuron(neuron.spec, norm.eps, self.max_pool is not None, steps, above)
            self._norm_neurons[steps, norm.eps, above] = norm_neuron
        spikes, mean, variance, count = norm_pool_neuron(
            y,
            BatchNorm(weight, bias, fixed, norm.shared),
            norm_neuron,
            neuron._parameters["w"],
            backend=neuron.backend,
            without_spikes=self._without_spikes,
        )
        if fixed is None:
            if cancelled_bias is not None:
                mean = mean + cancelled_bias.detach()
            # Equal frames are computed once: mean and variance stay, but the unbiased variance counts all of them.
            repeats = steps // y.shape[0]
            norm.record(mean, variance, repeats * count)
        return neuron.observe(spikes)

    @contextmanager
    def without_spikes(self) -> Iterator[None]:
        """Fused forwards inside return zeros: a recomputation needs only the graph for backward."""
        self._without_spikes = True
        try:
            yield
        finally:
            self._without_spikes = False


def neuron_uses(layers: Iterable[nn.Module]) -> set[NeuronUse]:
    """Neurons in these layers and the kernels they call."""
    uses = set[NeuronUse]()
    fused = set[nn.Module]()
    for layer in layers:
        # A module comes before its parts.
        for module in layer.modules():
            if isinstance(module, ConvNormNeuron) and module.is_fused and isinstance(module.neuron, ParallelNeuron):
                uses.add(NeuronUse(module.neuron.spec, has_norm=True, pools=module.max_pool is not None))
                fused.add(module.neuron)
            elif isinstance(module, ParallelNeuron | ParallelBiSpike) and module not in fused:
                uses.add(NeuronUse(module.spec, has_norm=False))
    return uses


class NeuronConvNorm(nn.Module):
    """neuron -> conv -> norm on potentials: `[T, N, C_in/size, H, W]` -> `[T, N, C_out/size, H, W]`."""

    mixes_tokens = False

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
    """x + fc2(fc1(x)) for each token: second half of a Spikformer or QKFormer block."""

    mixes_tokens = False

    def __init__(self, dim: int, hidden: int, **conv_options: Any) -> None:
        super().__init__()
        self.fc1 = ConvNormNeuron(dim, hidden, dims=1, **conv_options)
        self.fc2 = ConvNormNeuron(hidden, dim, dims=1, **conv_options)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.fc2(self.fc1(x))


class Residual(nn.Module):
    """x + inner(x)."""

    mixes_tokens = False

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) + x
