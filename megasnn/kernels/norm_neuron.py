"""Batch norm, optional max pooling and neurons in one call: checks arguments, a backend computes."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megasnn.common.recompute import cached_collective
from megasnn.kernels.backends import AUTO_BACKEND, backend_for
from megasnn.kernels.layout import channels_last
from megasnn.kernels.neuron import check_neuron
from megasnn.kernels.norm_neuron_kernels import (
    Affine,
    Norm,
    NormNeuron,
    NormNeuronInput,
    NormNeuronKernels,
    ParameterGradients,
    Statistics,
    gradient_of_w,
)
from megasnn.kernels.spike_codec import remember_bits


class Shared(Protocol):
    """Exchange between ranks whose values are normalised together."""

    def statistics(self, own: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """Merges the ranks' means and biased variances `[2, C]`, each over `count` values; adds the counts."""

    def total(self, sums: Tensor) -> Tensor:
        """Sum over the ranks."""


class BatchNorm(NamedTuple):
    """Batch norm before neurons.

    Attributes:
        weight, bias: scale and shift `[C]`, or None.
        running: mean and variance `[C]`; None for input statistics over time, samples and space.
        shared: exchange with other ranks; None where this rank has all values.
    """

    weight: Tensor | None = None
    bias: Tensor | None = None
    running: tuple[Tensor, Tensor] | None = None
    shared: Shared | None = None


class NormNeuronOutput(NamedTuple):
    """
    Attributes:
        spikes: `[time_steps, N, C, ...]` in the input's type.
        mean, variance: `[C]` in double precision, without gradient.
        values: number of values per channel in the statistics; a scalar on the device where ranks share them.
    """

    spikes: Tensor
    mean: Tensor
    variance: Tensor
    values: int | Tensor


def norm_pool_neuron(
    x: Tensor,
    norm: BatchNorm,
    norm_neuron: NormNeuron,
    w: Tensor | None = None,
    *,
    above: Tensor | None = None,
    backend: str = AUTO_BACKEND,
    fires: bool = True,
) -> NormNeuronOutput:
    """Batch norm, then optionally ``MaxPool2d(3, stride=2, padding=1)``, then a layer of neurons at rest.

    Running statistics are left alone: the caller merges the returned ones.

    Args:
        x: ``[T, N, C, H, W]`` or ``[T, N, C, L]``, with ``time_steps`` steps or 1. On the meta device only shapes are
            computed.
        above: with pooling, another rank's row ``[T, N, C, 1, W]`` above ``x``, not in the statistics. ``x`` then
            begins with an even image row. None, or no column: ``x`` begins at the edge.
        fires: False skips the spikes and returns zeros without memory; recomputation needs only the graph.

    Raises:
        ValueError: an unknown or unusable backend, time steps that do not fit, or statistics over a single value.
    """
    spec = norm_neuron.spec
    own_values = x.numel() // x.shape[2]
    check_neuron(x, spec, w)
    if x.shape[0] not in (1, norm_neuron.time_steps):
        raise ValueError(
            f"input has {x.shape[0]} time steps; it must have 1 or {norm_neuron.time_steps} (--time-steps)"
        )
    if own_values == 1 and norm.running is None and norm.shared is None:
        raise ValueError(f"batch statistics need more than one value per channel, got input {tuple(x.shape)}")
    if x.is_meta:
        of_channels = x.new_empty(x.shape[2:3])
        return NormNeuronOutput(x.new_empty(norm_neuron.shape_of_spikes(x)), of_channels, of_channels, own_values)
    x = channels_last(x)
    kernels = backend_for(backend, x, spec).norm_neuron_kernels()
    statistics, count = _statistics(kernels, x.detach(), norm, norm_neuron.eps)
    options = _CallOptions(
        norm_neuron,
        kernels,
        statistics,
        values=count if norm.running is None else None,
        shared=norm.shared,
        fires=fires,
        # Writing the bits costs next to nothing while the spikes are at hand. Only a backward needs them.
        packed=torch.is_grad_enabled() and spec.largest == 1,
    )
    # For backward only the input and the statistics are stored; the kernels compute everything else again.
    spikes, bits = _NormNeuronFunction.apply(x, above, norm.weight, norm.bias, w, options)
    mean, variance = statistics.values.unbind()
    return NormNeuronOutput(remember_bits(spikes, bits), mean, variance, count)


def _statistics(
    kernels: NormNeuronKernels[Any], x: Tensor, norm: BatchNorm, eps: float
) -> tuple[Statistics, int | Tensor]:
    """Statistics to normalise with, and their number of values per channel."""
    own_values = x.numel() // x.shape[2]
    shared = norm.shared
    if norm.running is not None:
        running = torch.stack([each.detach().double() for each in norm.running])
        return _with_coefficients(kernels, running, norm, eps, x.dtype), own_values
    if shared is None:
        affine = Affine(norm.weight, norm.bias, eps)
        return cached_collective(partial(kernels.statistics, x, affine)), own_values

    def over_ranks() -> tuple[Tensor, int | Tensor]:
        if own_values:
            own = kernels.statistics(x).values
        else:
            own = x.new_zeros((2, x.shape[2]), dtype=torch.float64)
        return shared.statistics(own, own_values)

    values, count = cached_collective(over_ranks)
    return _with_coefficients(kernels, values, norm, eps, x.dtype), count


def _with_coefficients(
    kernels: NormNeuronKernels[Any], values: Tensor, norm: BatchNorm, eps: float, dtype: torch.dtype
) -> Statistics:
    mean, variance = values.unbind()
    return Statistics(values, kernels.coefficients(Norm(mean, variance, norm.weight, norm.bias), eps, dtype))


class _CallOptions(NamedTuple):
    norm_neuron: NormNeuron
    kernels: NormNeuronKernels[Any]
    statistics: Statistics
    values: int | Tensor | None  # per channel behind the statistics; None where they do not depend on the input
    shared: Shared | None
    fires: bool  # compute spikes
    packed: bool  # also pack them into bits


class _NormNeuronFunction(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        above: Tensor | None,
        weight: Tensor | None,
        bias: Tensor | None,
        w: Tensor | None,
        options: _CallOptions,
    ) -> tuple[Tensor, Tensor | None]:
        norm_neuron = options.norm_neuron
        values, coefficients = options.statistics
        mean, variance = values.unbind()
        ctx.empty_above = None
        if above is not None and above.shape[3]:
            norm_neuron = replace(norm_neuron, above=1)
            x = channels_last(torch.cat([above, x], dim=3))
        elif above is not None:
            ctx.empty_above = above
        bits = None
        if options.fires and x.numel():
            inputs = NormNeuronInput(x, Norm(mean, variance, weight, bias, coefficients), w, norm_neuron)
            spikes, bits = options.kernels.fire(inputs, options.packed)
        else:
            spikes = x.new_zeros(()).expand(norm_neuron.shape_of_spikes(x))
        # A missing gradient stays None, so that backward computes nothing for it.
        ctx.set_materialize_grads(False)
        ctx.norm_neuron = norm_neuron
        ctx.kernels = options.kernels
        ctx.values = options.values
        ctx.shared = options.shared
        ctx.save_for_backward(x, weight, bias, w, mean, variance, coefficients)
        if bits is not None:
            ctx.mark_non_differentiable(bits)
        return spikes, bits

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g_spikes: Tensor | None, _: None) -> tuple[Tensor | None, ...]:
        if g_spikes is None:
            return (None,) * 6
        x, weight, bias, w, mean, variance, coefficients = ctx.saved_tensors
        need_x, need_above, _, _, need_w, _ = ctx.needs_input_grad
        inputs = NormNeuronInput(x, Norm(mean, variance, weight, bias, coefficients), w, ctx.norm_neuron)
        g_spikes = channels_last(g_spikes)
        own_values = x.numel() // x.shape[2]
        intermediate = None
        of_norm = None
        if own_values:
            count = own_values if ctx.values is not None and ctx.shared is None else None
            sums, intermediate, of_norm = ctx.kernels.backward_sums(inputs, g_spikes, need_w, count)
        else:
            # A rank without values still takes part in the exchange below.
            sums = x.new_zeros((3, x.shape[2]), dtype=torch.float64)
        if of_norm is None:
            of_norm = parameter_gradients(sums, inputs.norm, ctx.norm_neuron.eps)
        g_x = None
        g_above = ctx.empty_above
        if need_x or need_above:
            all_sums = None if ctx.values is None else sums
            if all_sums is not None and ctx.shared is not None:
                # Scaled, because the kernels divide by this rank's number of values to get a mean over all ranks.
                all_sums = ctx.shared.total(sums) * (own_values / ctx.values)
            g_x = x
            if own_values:
                g_x = ctx.kernels.input_gradient(inputs, g_spikes, all_sums, own_values, intermediate)
            if ctx.norm_neuron.above:
                g_above = g_x[:, :, :, :1]
                g_x = g_x[:, :, :, 1:]
                if all_sums is not None:
                    # The means are subtracted by the rank that owns the row, so they are added back here.
                    g_above = g_above + _subtracted_means(inputs, x[:, :, :, :1], all_sums / own_values)
        g_w = gradient_of_w(sums[2].sum(), w, ctx.norm_neuron.spec) if need_w else None
        return g_x, g_above, of_norm.weight, of_norm.bias, g_w, None


def parameter_gradients(sums: Tensor, norm: Norm, eps: float) -> ParameterGradients:
    of_weight = None
    of_bias = None
    if norm.weight is not None:
        of_weight = (sums[1] * (norm.variance + eps).rsqrt()).to(norm.weight.dtype)
    if norm.bias is not None:
        of_bias = sums[0].to(norm.bias.dtype)
    return ParameterGradients(of_weight, of_bias)


def _subtracted_means(inputs: NormNeuronInput, x: Tensor, means: Tensor) -> Tensor:
    """The input gradient's terms at values x through the statistics: mean g, and mean g per deviation."""
    norm = inputs.norm
    precision = (norm.variance + inputs.norm_neuron.eps).reciprocal()
    scale = precision.sqrt()
    if norm.weight is not None:
        scale = scale * norm.weight.detach()
    offset = (scale * means[0]).view(-1, 1, 1)
    slope = (scale * means[1] * precision).view(-1, 1, 1)
    mean = norm.mean.view(-1, 1, 1)
    return (offset + (x - mean) * slope).to(x.dtype)
