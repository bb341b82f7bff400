"""The unit of batch norm, optional max pooling and neurons: arguments are checked, a backend computes.

A backend computes a unit by four calls. Between them stand sums over the samples and pixels that one rank has: where
ranks share a micro-batch, they exchange them there. For backward the input is kept, and the statistics; all else is
computed again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megasnn.common.recompute import cached_collective
from megasnn.kernels.backends import AUTO_BACKEND, backend_for
from megasnn.kernels.layout import channels_last
from megasnn.kernels.neuron import check_neuron, gradient_of_w
from megasnn.kernels.neuron_spec import NeuronSpec
from megasnn.kernels.spike_codec import remember_bits


@dataclass(frozen=True)
class NormNeuron:
    """Description of a unit of norm, pooling and neurons, besides its tensors (not a schedule's or a layout's unit).

    Attributes:
        eps: of the norm.
        pool: whether norm and neurons have max pooling between them, which needs `[T, N, C, H, W]`.
        time_steps: of the spikes. Where the input has a single one, the same comes at every step.
        above: with pooling, how many rows of the input, 0 or 1, come before the middle of the first windows; without
            one, the windows reach beyond the image there.
    """

    spec: NeuronSpec
    eps: float
    pool: bool
    time_steps: int
    above: int = 0

    def shape_of_spikes(self, x: Tensor) -> tuple[int, ...]:
        """The shape for an input `[X, N, C, ...]`."""
        return self.time_steps, *x.shape[1:3], *self.space_of_spikes(x.shape[3:])

    def space_of_spikes(self, space: Sequence[int]) -> tuple[int, ...]:
        """The sides for an input of these sides."""
        if not self.pool:
            return tuple(space)
        height, width = space
        return (height - self.above + 1) // 2, (width + 1) // 2


class Norm(NamedTuple):
    """Tensors `[C]`: mean and biased variance to normalise with, in double precision; scale and shift, or None."""

    mean: Tensor
    variance: Tensor
    weight: Tensor | None
    bias: Tensor | None


class Shared(Protocol):
    """The exchange between ranks of which each has a part of the values that are normalised together."""

    def statistics(self, own: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """Mean and biased variance `[2, C]` of what all ranks have, and its number of values a channel, in double
        precision, from those of this rank's own."""

    def total(self, sums: Tensor) -> Tensor:
        """The sum over the ranks, on each of them."""


class BatchNorm(NamedTuple):
    """Batch norm of a unit.

    Attributes:
        weight, bias: scale and shift `[C]`, or None.
        running: mean and variance `[C]` to normalise with; None for those of the input over time, samples and space.
        shared: with whom the values are shared that are normalised together.
    """

    weight: Tensor | None = None
    bias: Tensor | None = None
    running: tuple[Tensor, Tensor] | None = None
    shared: Shared | None = None


class ParameterGradients(NamedTuple):
    """Gradients `[C]` of a norm's scale and shift, in their types; None of what it lacks."""

    weight: Tensor | None
    bias: Tensor | None


class NormNeuronOutput(NamedTuple):
    """
    Attributes:
        spikes: `[time_steps, N, C, ...]` in the type of the input.
        mean, variance: `[C]`, those that the input was normalised with; without gradient.
        values: a channel, over which they were taken: their number; a scalar on the device where ranks share them.
    """

    spikes: Tensor
    mean: Tensor
    variance: Tensor
    values: int | Tensor


class NormNeuronKernels(Protocol):
    """The four calls. Inputs `[X, N, C, ...]`, X = T or 1, and spikes are channels-last in memory."""

    def statistics(self, x: Tensor) -> Tensor:
        """Mean and biased variance of each channel, `[2, C]` in double precision."""

    def fire(
        self, x: Tensor, norm: Norm, w: Tensor | None, norm_neuron: NormNeuron, packed: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        """Spikes `[T, N, C, ...]` in the type of x; if asked for, also as `spike_codec.pack_bits` packs them."""

    def backward_sums(
        self, x: Tensor, g_spikes: Tensor, norm: Norm, w: Tensor | None, norm_neuron: NormNeuron, learn: bool
    ) -> tuple[Tensor, Any, ParameterGradients | None]:
        """Sums `[3, C]` in double precision, g being the gradient of the normalised input: of g, of g (x - mean), and
        with `learn` of what the gradient of w needs (`gradient_of_w`). What `input_gradient` takes as carried. And the
        gradients of the norm's parameters, where they come with the sums; otherwise `parameter_gradients` gives them.
        """

    def input_gradient(
        self,
        x: Tensor,
        g_spikes: Tensor,
        norm: Norm,
        w: Tensor | None,
        norm_neuron: NormNeuron,
        sums: Tensor | None,
        count: int,
        carried: Any,
    ) -> Tensor:
        """The gradient of x.

        Args:
            sums: the first two, over `count` values a channel; None where statistics did not depend on x.
        """


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

    The norm leaves running statistics alone: the caller merges what is returned.

    Args:
        x: ``[T, N, C, H, W]`` or ``[T, N, C, L]``, T being the unit's time steps or 1; on the meta device as for
            `neuron_multi_step`.
        above: with pooling, the row ``[T, N, C, 1, W]`` above ``x`` that another rank has, which statistics do not
            count. Then ``x`` begins with an even row of the image; without it, or of no row, at its edge.
        fires: False where only the graph is wanted: the spikes are then zeros without memory.

    Returns:
        Spikes, and the statistics that were used (float32 when ``x`` is bfloat16); see `NormNeuronOutput`.

    Raises:
        ValueError: an unknown backend, time steps that do not fit, a single value per channel to take statistics of,
            or a backend that cannot be used here.
    """
    spec, steps, own = norm_neuron.spec, norm_neuron.time_steps, x.numel() // x.shape[2]
    check_neuron(x, spec, w)
    if x.shape[0] not in (1, steps):
        raise ValueError(f"input has {x.shape[0]} time steps; it must have 1 or {steps} (--time-steps)")
    if own == 1 and norm.running is None and norm.shared is None:
        raise ValueError(f"batch statistics need more than one value per channel, got input {tuple(x.shape)}")
    if x.is_meta:
        of_channels = x.new_empty(x.shape[2:3])
        return NormNeuronOutput(x.new_empty(norm_neuron.shape_of_spikes(x)), of_channels, of_channels, own)
    x, calls = channels_last(x), backend_for(backend, x, spec).norm_neuron_kernels()
    statistics, count = _statistics(calls, x.detach(), norm)
    # Writing the bits costs next to nothing while the spikes are at hand. Only a backward needs them.
    packed = torch.is_grad_enabled() and spec.largest == 1
    options = _CallOptions(
        norm_neuron, calls, statistics, None if norm.running is not None else count, norm.shared, fires, packed
    )
    spikes, bits = _NormNeuronFunction.apply(x, above, norm.weight, norm.bias, w, options)
    mean, variance = statistics.to(torch.float64 if x.dtype == torch.float64 else torch.float32).unbind()
    return NormNeuronOutput(remember_bits(spikes, bits), mean, variance, count)


def _statistics(calls: NormNeuronKernels, x: Tensor, norm: BatchNorm) -> tuple[Tensor, int | Tensor]:
    """Mean and variance to normalise with, `[2, C]` in double precision, and of how many values a channel they are."""
    own, shared = x.numel() // x.shape[2], norm.shared
    if norm.running is not None:
        return torch.stack([each.detach().double() for each in norm.running]), own
    if shared is None:
        return cached_collective(partial(calls.statistics, x)), own

    def of_all() -> tuple[Tensor, int | Tensor]:
        of_own = calls.statistics(x) if own else x.new_zeros((2, x.shape[2]), dtype=torch.float64)
        return shared.statistics(of_own, own)

    return cached_collective(of_all)


class _CallOptions(NamedTuple):
    """Options that the forward and the backward of a unit have in common.

    Attributes:
        statistics: see `_statistics`. values: over how many values of the input they were taken; None where they do not
            depend on it.
        fires, packed: whether the spikes are wanted, and as bits as well.
    """

    norm_neuron: NormNeuron
    calls: NormNeuronKernels
    statistics: Tensor
    values: int | Tensor | None
    shared: Shared | None
    fires: bool
    packed: bool


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
        norm_neuron, (mean, variance) = options.norm_neuron, options.statistics.unbind()
        ctx.without_above = above if above is not None and not above.shape[3] else None
        if above is not None and above.shape[3]:
            norm_neuron, x = replace(norm_neuron, above=1), channels_last(torch.cat([above, x], dim=3))
        if options.fires and x.numel():
            spikes, bits = options.calls.fire(x, Norm(mean, variance, weight, bias), w, norm_neuron, options.packed)
        else:
            spikes, bits = x.new_zeros(()).expand(norm_neuron.shape_of_spikes(x)), None
        ctx.set_materialize_grads(False)
        ctx.norm_neuron, ctx.calls, ctx.values, ctx.shared = norm_neuron, options.calls, options.values, options.shared
        ctx.save_for_backward(x, weight, bias, w, mean, variance)
        if bits is not None:
            ctx.mark_non_differentiable(bits)
        return spikes, bits

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g_spikes: Tensor | None, _: None) -> tuple[Tensor | None, ...]:
        if g_spikes is None:
            return (None,) * 6
        x, weight, bias, w, mean, variance = ctx.saved_tensors
        need_x, need_above, need_weight, need_bias, need_w = ctx.needs_input_grad[:5]
        norm_neuron, calls, norm = ctx.norm_neuron, ctx.calls, Norm(mean, variance, weight, bias)
        g_spikes, count = channels_last(g_spikes), x.numel() // x.shape[2]
        of_norm = None
        if count:
            sums, carried, of_norm = calls.backward_sums(x, g_spikes, norm, w, norm_neuron, need_w)
        else:
            sums = x.new_zeros((3, x.shape[2]), dtype=torch.float64)
        if of_norm is None:
            of_norm = parameter_gradients(sums, norm, norm_neuron.eps)
        g_x, g_above = None, ctx.without_above
        if need_x or need_above:
            means = None if ctx.values is None else sums
            if means is not None and ctx.shared is not None:
                # What is divided by this rank's number of values is to be a mean over all.
                means = ctx.shared.total(sums) * (count / ctx.values)
            g_x = calls.input_gradient(x, g_spikes, norm, w, norm_neuron, means, count, carried) if count else x
            if norm_neuron.above:
                g_above, g_x = g_x[:, :, :, :1], g_x[:, :, :, 1:]
                if means is not None:  # the rank whose row that is takes these off
                    g_above = g_above + _means_of(x[:, :, :, :1], means / count, norm, norm_neuron.eps)
        return (
            g_x,
            g_above,
            of_norm.weight if need_weight else None,
            of_norm.bias if need_bias else None,
            gradient_of_w(sums[2].sum(), w, norm_neuron.spec) if need_w else None,
            None,
        )


def parameter_gradients(sums: Tensor, norm: Norm, eps: float) -> ParameterGradients:
    """Gradients of scale and shift from the sums of a backward."""
    of_weight = None if norm.weight is None else (sums[1] * (norm.variance + eps).rsqrt()).to(norm.weight.dtype)
    return ParameterGradients(of_weight, None if norm.bias is None else sums[0].to(norm.bias.dtype))


def _means_of(x: Tensor, means: Tensor, norm: Norm, eps: float) -> Tensor:
    """Part that the input gradient of values has lost by the means of the gradients, and of those by deviations."""
    precision = (norm.variance + eps).reciprocal()
    scale = precision.sqrt() if norm.weight is None else precision.sqrt() * norm.weight.detach()
    of_channels = scale * means[0], scale * means[1] * precision, norm.mean
    each, slope, mean = (values.view(-1, 1, 1) for values in of_channels)
    return (each + (x - mean) * slope).to(x.dtype)
