"""Neurons, batch norm and max pooling in plain PyTorch: the reference for every faster kernel.

Charge, fire and reset do SpikingJelly 2.0.0's arithmetic (``spikingjelly/_ops``) in its order.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from megasnn.kernels.bispike import DECAY, amplitudes_of
from megasnn.kernels.layout import channels_last, flat_in_memory
from megasnn.kernels.neuron_spec import NEURONS, SURROGATES, NeuronSpec
from megasnn.kernels.norm_neuron_kernels import (
    BackwardSums,
    BatchNorm,
    NeuronKernels,
    NormNeuron,
    NormNeuronInput,
    NormNeuronKernels,
    Statistics,
    parameter_gradients,
)
from megasnn.kernels.spike_codec import Content, encode, pack_bits, remember_bits, wants_bits

REDUCED = (torch.bfloat16, torch.float16)
"""Types whose arithmetic is done in float32."""


def computed_in(x: Tensor) -> torch.dtype:
    """The arithmetic's type: float32 where x is narrower."""
    return torch.float32 if x.dtype in REDUCED else x.dtype


@cache
def surrogate_function(name: str, alpha: float) -> Callable[[Tensor], Tensor]:
    """A step forward, a smooth gradient backward."""
    entry = SURROGATES[name]
    if entry.gradient is not None:
        return partial(_fire, partial(_step, entry.gradient, alpha))
    # Only surrogates without a `gradient` in the table need SpikingJelly.
    from spikingjelly.activation_based import surrogate

    return partial(_fire, getattr(surrogate, str(entry.spikingjelly))(alpha=alpha))


def _fire(surrogate: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    if x.requires_grad:
        return surrogate(x)
    # torch.jit.trace follows this, and not the surrogate.
    return (x >= 0).to(x.dtype)


def _step(gradient: Callable[[Tensor, float], Tensor], alpha: float, x: Tensor) -> Tensor:
    return _Step.apply(x, gradient, alpha)


class _Step(torch.autograd.Function):
    """1 where the input is 0 or more; backward multiplies by a function of the input."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, gradient: Callable[[Tensor, float], Tensor], alpha: float) -> Tensor:
        ctx.gradient = gradient
        ctx.alpha = alpha
        ctx.save_for_backward(x)
        return (x >= 0).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (x,) = ctx.saved_tensors
        return grad * ctx.gradient(x, ctx.alpha), None, None


def firing(spec: NeuronSpec) -> Callable[[Tensor], Tensor]:
    """Maps the potential before firing to spikes, or to counts."""
    levels = NEURONS[spec.kind].levels
    if levels is not None:
        return lambda h: _Count.apply(h / spec.v_threshold, levels)
    fire = surrogate_function(spec.surrogate, spec.surrogate_alpha)
    return lambda h: fire(h - spec.v_threshold)


class _Count(torch.autograd.Function):
    """Clips to 0 ... levels and rounds half to even; backward is the identity where nothing is clipped."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, levels: int) -> Tensor:
        # A byte a value, in place of the input.
        ctx.save_for_backward((x >= 0) & (x <= levels))
        return x.clamp(0, levels).round()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (inside,) = ctx.saved_tensors
        return grad * inside, None


def reset(h: Tensor, spike: Tensor, spec: NeuronSpec) -> Tensor:
    if spec.detach_reset:
        spike = spike.detach()
    if spec.v_reset is None:
        return h - spike * spec.v_threshold
    return spike * spec.v_reset + (1.0 - spike) * h


def _neuron_multi_step(x: Tensor, v0: Tensor | None, w: Tensor | None, spec: NeuronSpec) -> tuple[Tensor, Tensor]:
    dtype = computed_in(x)
    q = None if w is None else w.to(dtype).sigmoid()
    v = None if v0 is None else v0.to(dtype)
    spikes, last = _steps(x.to(dtype), v, q, spec)
    return spikes.to(x.dtype), last


def _steps(inputs: Tensor, v0: Tensor | None, q: Tensor | None, spec: NeuronSpec) -> tuple[Tensor, Tensor]:
    """Runs all time steps.

    Args:
        q: the charge's learned factor; None for neurons without one.

    Returns:
        Spikes, channels-last in memory, and the last potential.
    """
    neuron = NEURONS[spec.kind]
    factor = neuron.constant(inputs, spec) if q is None else q
    fire = firing(spec)
    v = torch.full_like(inputs[0], spec.rest) if v0 is None else v0
    spikes = []
    for current in inputs:
        h = neuron.charge(current, v, spec, factor)
        spike = fire(h)
        v = reset(h, spike, spec)
        spikes.append(spike)
    return _stacked(spikes), v


def _stacked(spikes: list[Tensor]) -> Tensor:
    """`[T, N, C, ...]`, channels last in memory, from the time steps' spikes."""
    channels = min(1, spikes[0].ndim - 1)
    return torch.stack([each.movedim(channels, -1) for each in spikes]).movedim(-1, 1 + channels)


def _bispike_multi_step(x: Tensor, v0: Tensor | None, w: Tensor | None, spec: NeuronSpec) -> tuple[Tensor, Tensor]:
    """See `megasnn.kernels.bispike`. Args: w: amplitudes `[T]`."""
    dtype = computed_in(x)
    inputs = x.to(dtype)
    v = torch.zeros_like(inputs[0]) if v0 is None else v0.to(dtype)
    spikes = []
    for current, a in zip(inputs, amplitudes_of(w, spec, x, dtype), strict=True):
        m = v + current
        spike = _Ternary.apply(m, a)
        v = m * (DECAY * (a - a * spike.detach()))
        spikes.append(spike)
    return _stacked(spikes).to(x.dtype), v


class _Ternary(torch.autograd.Function):
    """1 above a / 2, -1 below -a / 2, else 0; backward divides by a, the amplitude, where |m| <= a."""

    # The same as rounding m / a half to even, clipped to -1 ... 1, in every rounding of the quotient. There is no -0.
    @staticmethod
    def forward(ctx: Any, m: Tensor, a: Tensor) -> Tensor:
        ctx.save_for_backward(m.abs() <= a, a.reciprocal())
        return (m > 0.5 * a).to(m.dtype) - (m < -0.5 * a).to(m.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        inside, inverse = ctx.saved_tensors
        return torch.where(inside, grad * inverse, 0.0), None


def recompute_in_backward(function: Callable[..., tuple[Tensor, ...]], *inputs: Tensor | None) -> tuple[Tensor, ...]:
    """Calls a function and stores only its inputs: backward computes intermediate values again.

    Args:
        function: free of side effects; all tensors with a gradient are among its arguments.
    """
    if not torch.is_grad_enabled():
        return function(*inputs)
    return _Recomputed.apply(function, *inputs)


class _Recomputed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, function: Callable[..., tuple[Tensor, ...]], *inputs: Tensor | None) -> tuple[Tensor, ...]:
        ctx.function = function
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*inputs)
        return function(*inputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        needed = ctx.needs_input_grad[1:]
        inputs = [None if each is None else each.detach() for each in ctx.saved_tensors]
        wanted = []
        for tensor, needs in zip(inputs, needed, strict=True):
            if tensor is not None and needs:
                wanted.append(tensor.requires_grad_())
        with torch.enable_grad():
            outputs = ctx.function(*inputs)
        with_gradient = [(output, grad) for output, grad in zip(outputs, grads, strict=True) if grad is not None]
        if not with_gradient:
            return (None, *(None for _ in needed))
        results, result_gradients = zip(*with_gradient, strict=True)
        found = iter(torch.autograd.grad(results, wanted, result_gradients, allow_unused=True))
        return (None, *(next(found) if needs else None for needs in needed))


def batch_norm(
    x: Tensor, running: tuple[Tensor, Tensor] | None, weight: Tensor | None, bias: Tensor | None, eps: float
) -> Tensor:
    """torch's batch norm for ``[N, C, ...]``, with running statistics, or x's own where there are none."""
    mean, var = running or (None, None)
    training = running is None
    if x.shape[0] != 1:
        return F.batch_norm(x, mean, var, weight, bias, training=training, eps=eps)
    # For a single frame in channels-last order torch 2.13 and 2.14 confuse the memory orders of gradient and input, and
    # return a wrong gradient without an error (findings/torch_batch_norm_one_frame.sh). Such a frame goes in as rows
    # [pixels, C].
    rows = x.movedim(1, -1).reshape(-1, x.shape[1])
    y = F.batch_norm(rows, mean, var, weight, bias, training=training, eps=eps)
    return y.view(1, *x.shape[2:], x.shape[1]).movedim(-1, 1)


class TorchNormNeuron(NormNeuronKernels[Tensor]):
    """The reference. Carries the normalised input's gradient."""

    def statistics(self, x: Tensor, norm: BatchNorm | None = None) -> Statistics:
        frames = _frames(x)
        over = [dim for dim in range(frames.ndim) if dim != 1]
        variance, mean = torch.var_mean(frames, dim=over, correction=0)
        return Statistics(torch.stack((mean, variance)).double())

    def fire(self, inputs: NormNeuronInput, packed: bool = False) -> tuple[Tensor, Tensor | None]:
        x = inputs.x
        w = inputs.w
        norm_neuron = self.norm_neuron
        q = None if w is None else w.detach().to(computed_in(x)).sigmoid()
        with torch.no_grad():
            normalised = _normalised(inputs, norm_neuron.eps)
            spikes = channels_last(_spikes(normalised, q, norm_neuron).to(x.dtype))
        return spikes, pack_bits(spikes) if packed else None

    def backward_sums(
        self, inputs: NormNeuronInput, g_spikes: Tensor, learn: bool, count: int | None = None
    ) -> BackwardSums[Tensor]:
        x = inputs.x
        w = inputs.w
        norm_neuron = self.norm_neuron
        y = _normalised(inputs, norm_neuron.eps).requires_grad_()
        q = None if w is None else w.detach().to(y.dtype).sigmoid().requires_grad_(learn)
        with torch.enable_grad():
            spikes = _spikes(y, q, norm_neuron)
        wanted = [y] if q is None or not learn else [y, q]
        g, *g_q = torch.autograd.grad(spikes, wanted, g_spikes.to(y.dtype))
        sums = g.new_zeros((3, x.shape[2]), dtype=torch.float64)
        over = [dim for dim in range(g.ndim) if dim != 2]
        sums[0] = g.sum(over, dtype=torch.float64)
        sums[1] = (g * (x.to(g.dtype) - _channel_values(inputs.mean, g))).sum(over, dtype=torch.float64)
        if q is not None and g_q:
            total = g_q[0].sum()
            if norm_neuron.spec.decay_input:
                # `gradient_of_w` then multiplies by (1 - q) / q in place of q (1 - q).
                total = total * q.detach() ** 2
            sums[2, 0] = total
        return BackwardSums(sums, g, *parameter_gradients(sums, inputs, norm_neuron.eps))

    def input_gradient(
        self, inputs: NormNeuronInput, g_spikes: Tensor, sums: Tensor | None, count: int, intermediate: Tensor
    ) -> Tensor:
        x = inputs.x
        g = intermediate
        precision = (inputs.variance.double() + self.norm_neuron.eps).reciprocal()
        if sums is not None:
            mean_g = _channel_values(sums[0] / count, g)
            g_per_deviation = _channel_values(sums[1] * precision / count, g)
            g = g - mean_g - (x.to(g.dtype) - _channel_values(inputs.mean, g)) * g_per_deviation
        scale = precision.sqrt()
        if inputs.weight is not None:
            scale = scale * inputs.weight.detach()
        return (g * _channel_values(scale, g)).to(x.dtype)


class TorchNeuron(NeuronKernels):
    def multi_step(self, x: Tensor, v0: Tensor | None, w: Tensor | None) -> tuple[Tensor, Tensor]:
        is_ternary = NEURONS[self.spec.kind].ternary
        compute = partial(_bispike_multi_step if is_ternary else _neuron_multi_step, spec=self.spec)
        if x.dtype in REDUCED:
            # Autograd would keep every step's float32 values, twice as large as the input.
            spikes, v = recompute_in_backward(compute, x, v0, w)
        else:
            spikes, v = compute(x, v0, w)
        if self.spec.largest > 1 or not wants_bits(spikes):
            return spikes, v
        content = Content.TERNARY if is_ternary else Content.SPIKES
        return remember_bits(spikes, encode(flat_in_memory(spikes.detach()), content), content), v


def _normalised(inputs: NormNeuronInput, eps: float) -> Tensor:
    x = inputs.x
    dtype = computed_in(x)
    mean = inputs.mean.to(dtype)
    variance = inputs.variance.to(dtype)
    weight = None if inputs.weight is None else inputs.weight.detach().to(dtype)
    bias = None if inputs.bias is None else inputs.bias.detach().to(dtype)
    # Not in training: torch then takes the given statistics, which ranks may have merged.
    y = F.batch_norm(_frames(x).detach(), mean, variance, weight, bias, training=False, eps=eps)
    return y.unflatten(0, x.shape[:2])


def _spikes(y: Tensor, q: Tensor | None, norm_neuron: NormNeuron) -> Tensor:
    if norm_neuron.pool:
        frames = y.flatten(0, 1)
        padding = (1, 1)
        if norm_neuron.above:
            # Another rank's row takes the place of the padding at the top.
            frames = F.pad(frames, (0, 0, 0, 1), value=-torch.inf)
            padding = (0, 1)
        y = F.max_pool2d(frames, kernel_size=3, stride=2, padding=padding).unflatten(0, y.shape[:2])
    spikes, _ = _steps(y.expand(norm_neuron.time_steps, *y.shape[1:]), None, q, norm_neuron.spec)
    return spikes


def _channel_values(values: Tensor, like: Tensor) -> Tensor:
    """Values `[C]` in a shape and type that broadcast with `[T, N, C, ...]`."""
    return values.detach().to(like.dtype).view(-1, *[1] * (like.ndim - 3))


def _frames(x: Tensor) -> Tensor:
    """`[T * N, C, ...]`, in float32 where the type is narrower."""
    return x.flatten(0, 1).to(computed_in(x))
