"""Batch norm, optional max pooling and neurons in one call: checks arguments, a backend computes."""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megasnn.common.autograd import Function, refuse_second_derivative
from megasnn.common.recompute import cached_collective
from megasnn.kernels.backends import AUTO_BACKEND, norm_neuron_kernels
from megasnn.kernels.layout import channels_last
from megasnn.kernels.neuron import check_neuron
from megasnn.kernels.neuron_spec import NEURONS
from megasnn.kernels.norm_neuron_kernels import (
    BatchNorm,
    NormNeuron,
    NormNeuronInput,
    NormNeuronKernels,
    Shared,
    Statistics,
    gradient_of_w,
    parameter_gradients,
)
from megasnn.kernels.spike_codec import remember_bits


class NormNeuronOutput(NamedTuple):
    """Spikes, and the statistics of the norm before them.

    Attributes:
        spikes: `[time_steps, N, C, ...]` in the input's type.
        mean, variance: `[C]` in double precision, without gradient.
        values_per_channel: in the statistics; a scalar on the device where ranks share them.
    """

    spikes: Tensor
    mean: Tensor
    variance: Tensor
    values_per_channel: int | Tensor


def norm_pool_neuron(
    x: Tensor,
    norm: BatchNorm,
    norm_neuron: NormNeuron,
    w: Tensor | None = None,
    *,
    backend: str = AUTO_BACKEND,
    without_spikes: bool = False,
) -> NormNeuronOutput:
    """Batch norm, then optionally ``MaxPool2d(3, stride=2, padding=1)``, then a layer of neurons at rest.

    Running statistics are left alone: the caller merges the returned ones.

    Args:
        x: ``[T, N, C, H, W]`` or ``[T, N, C, L]``, with ``time_steps`` steps or 1. On the meta device only shapes are
            computed. With ``norm_neuron.above`` it begins with another rank's row, which is not in the statistics.
        without_spikes: returns zeros without memory; a recomputation needs only the graph for backward.

    Raises:
        ValueError: an unknown or unusable backend, time steps that do not fit, or statistics over a single value.
    """
    spec = norm_neuron.spec
    check_neuron(x, spec, w)
    if NEURONS[spec.kind].layer is not None:
        raise ValueError(
            f"a {spec.kind} neuron is no part of a norm's call: call its layer (make_neuron) after the norm"
        )
    if x.shape[0] not in (1, norm_neuron.time_steps):
        raise ValueError(
            f"input has {x.shape[0]} time steps; it must have 1 or {norm_neuron.time_steps} (--time-steps)"
        )
    own = x[:, :, :, norm_neuron.above :] if norm_neuron.above else x
    own_values = own.numel() // own.shape[2]
    if own_values == 1 and norm.running is None and norm.shared is None:
        raise ValueError(f"batch statistics need more than one value per channel, got input {tuple(own.shape)}")
    if x.is_meta:
        moment = x.new_empty(x.shape[2:3])
        return NormNeuronOutput(x.new_empty(norm_neuron.shape_of_spikes(x)), moment, moment, own_values)
    x = channels_last(x)
    kernels = norm_neuron_kernels(backend, x, norm_neuron)
    kernels_of_own = kernels
    if norm_neuron.above:
        # Kernels for statistics take dense memory. This copy is the only one that the foreign row costs.
        own = channels_last(own)
        kernels_of_own = norm_neuron_kernels(backend, own, norm_neuron)
    (moments, coefficients), count = _statistics(kernels_of_own, own.detach(), norm)
    values_per_channel = count if norm.running is None else None
    call = _Call(
        kernels,
        moments,
        coefficients,
        values_per_channel=values_per_channel,
        shared=norm.shared,
        without_spikes=without_spikes,
        # Writing the bits costs next to nothing while the spikes are at hand. Only a backward needs them.
        packed=torch.is_grad_enabled() and kernels.largest == 1,
    )
    # For backward only the input and the statistics are stored; the kernels compute everything else again.
    spikes, bits = _NormNeuronFunction.apply(x, norm.weight, norm.bias, w, call)
    mean, variance = moments.unbind()
    return NormNeuronOutput(remember_bits(spikes, bits), mean, variance, count)


def _statistics(kernels: NormNeuronKernels[Any], x: Tensor, norm: BatchNorm) -> tuple[Statistics, int | Tensor]:
    """Statistics to normalise with, and their number of values per channel."""
    shared = norm.shared
    if norm.running is not None:
        running = torch.stack([each.detach().double() for each in norm.running])
        return _with_coefficients(kernels, running, norm), kernels.values_per_channel
    if shared is None:
        return cached_collective(partial(kernels.statistics, x, norm)), kernels.values_per_channel

    def over_ranks() -> tuple[Tensor, int | Tensor]:
        if kernels.values_per_channel:
            own = kernels.statistics(x).moments
        else:
            own = x.new_zeros((2, kernels.channels), dtype=torch.float64)
        return shared.statistics(own, kernels.values_per_channel)

    moments, count = cached_collective(over_ranks)
    return _with_coefficients(kernels, moments, norm), count


def _with_coefficients(kernels: NormNeuronKernels[Any], moments: Tensor, norm: BatchNorm) -> Statistics:
    mean, variance = moments.unbind()
    return Statistics(moments, kernels.coefficients(mean, variance, norm))


class _Call(NamedTuple):
    kernels: NormNeuronKernels[Any]
    moments: Tensor  # mean and variance, `[2, C]`
    coefficients: Tensor | None
    values_per_channel: int | Tensor | None  # in the statistics; None where these do not depend on the input
    shared: Shared | None
    without_spikes: bool
    packed: bool  # also pack them into bits


class _NormNeuronFunction(Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        w: Tensor | None,
        call: _Call,
    ) -> tuple[Tensor, Tensor | None]:
        kernels = call.kernels
        mean, variance = call.moments.unbind()
        bits = None
        if x.numel() and not call.without_spikes:
            inputs = NormNeuronInput(x, mean, variance, weight, bias, w, call.coefficients)
            spikes, bits = kernels.fire(inputs, call.packed)
        else:
            spikes = x.new_zeros(()).expand(kernels.norm_neuron.shape_of_spikes(x))
        # A missing gradient stays None, so that backward computes nothing for it.
        ctx.set_materialize_grads(False)
        ctx.kernels = kernels
        ctx.values_per_channel = call.values_per_channel
        ctx.shared = call.shared
        ctx.save_for_backward(x, mean, variance, weight, bias, w, call.coefficients)
        return spikes, bits

    @staticmethod
    def backward(ctx: Any, g_spikes: Tensor | None, _: None) -> tuple[Tensor | None, ...]:
        if g_spikes is None:
            return (None,) * 5
        if torch.is_grad_enabled():
            refuse_second_derivative()
        kernels: NormNeuronKernels[Any] = ctx.kernels
        inputs = NormNeuronInput(*ctx.saved_tensors)
        x = inputs.x
        need_x, _, _, need_w, _ = ctx.needs_input_grad
        g_spikes = channels_last(g_spikes)
        own_values = kernels.values_per_channel
        if own_values:
            count = own_values if ctx.values_per_channel is not None and ctx.shared is None else None
            sums, intermediate, g_weight, g_bias = kernels.backward_sums(inputs, g_spikes, need_w, count)
        else:
            # A rank without values still takes part in the exchange below.
            sums = x.new_zeros((3, kernels.channels), dtype=torch.float64)
            intermediate = None
            g_weight, g_bias = parameter_gradients(sums, inputs, kernels.norm_neuron.eps)
        g_x = None
        if need_x:
            all_sums = None if ctx.values_per_channel is None else sums
            if all_sums is not None and ctx.shared is not None:
                # Scaled, because the kernels divide by this rank's number of values to get a mean over all ranks.
                all_sums = ctx.shared.total(sums) * (own_values / ctx.values_per_channel)
            g_x = x
            if own_values:
                g_x = kernels.input_gradient(inputs, g_spikes, all_sums, own_values, intermediate)
            if kernels.norm_neuron.above and all_sums is not None:
                # The means are subtracted by the rank that owns the row, so they are added back here.
                means = all_sums / own_values
                g_x[:, :, :, :1] += _subtracted_means(inputs, kernels.norm_neuron.eps, x[:, :, :, :1], means)
        g_w = None
        if need_w:
            assert inputs.w is not None
            g_w = gradient_of_w(sums[2].sum(), inputs.w, kernels.norm_neuron.spec)
        return g_x, g_weight, g_bias, g_w, None


def _subtracted_means(inputs: NormNeuronInput, eps: float, x: Tensor, means: Tensor) -> Tensor:
    """The input gradient's terms at values x through the statistics: mean g, and mean g per deviation."""
    precision = (inputs.variance + eps).reciprocal()
    scale = precision.sqrt()
    if inputs.weight is not None:
        scale = scale * inputs.weight.detach()
    offset = (scale * means[0]).view(-1, 1, 1)
    slope = (scale * means[1] * precision).view(-1, 1, 1)
    mean = inputs.mean.view(-1, 1, 1)
    return (offset + (x - mean) * slope).to(x.dtype)
