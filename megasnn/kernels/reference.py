"""The neuron and the norm-(pool-)neuron unit in plain PyTorch: the truth that every faster kernel must equal.

Charge, fire and reset do the arithmetic of SpikingJelly 2.0.0 (``spikingjelly/_ops``) in its order.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megasnn.kernels.recompute import recomputed
from megasnn.kernels.spec import NEURONS, SURROGATES, NeuronSpec

REDUCED = (torch.bfloat16, torch.float16)


@cache
def surrogate_function(name: str, alpha: float) -> Callable[[Tensor], Tensor]:
    """The surrogate function of that name: a step forward, a smooth gradient backward."""
    entry = SURROGATES[name]
    if entry.gradient is not None:
        return partial(_step, entry.gradient, alpha)
    from spikingjelly.activation_based import surrogate

    return getattr(surrogate, str(entry.spikingjelly))(alpha=alpha)


def _step(gradient: Callable[[Tensor, float], Tensor], alpha: float, x: Tensor) -> Tensor:
    return _Step.apply(x, gradient, alpha)


class _Step(torch.autograd.Function):
    """1 where the input is 0 or more; backward multiplies by a function of the input."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, gradient: Callable[[Tensor, float], Tensor], alpha: float) -> Tensor:
        ctx.gradient, ctx.alpha = gradient, alpha
        ctx.save_for_backward(x)
        return (x >= 0).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (x,) = ctx.saved_tensors
        return grad * ctx.gradient(x, ctx.alpha), None, None


def reset(h: Tensor, spike: Tensor, spec: NeuronSpec) -> Tensor:
    """Membrane potential after firing."""
    if spec.detach_reset:
        spike = spike.detach()
    if spec.v_reset is None:
        return h - spike * spec.v_threshold
    return spike * spec.v_reset + (1.0 - spike) * h


def neuron_multi_step(x: Tensor, spec: NeuronSpec, v0: Tensor | None, w: Tensor | None) -> tuple[Tensor, Tensor]:
    """See :func:`megasnn.kernels.unit.neuron_multi_step`."""
    if x.dtype in REDUCED:
        spikes, v = recomputed(partial(_neuron_multi_step, spec=spec), x, v0, w)
        return spikes, v
    return _neuron_multi_step(x, v0, w, spec)


def _neuron_multi_step(x: Tensor, v0: Tensor | None, w: Tensor | None, spec: NeuronSpec) -> tuple[Tensor, Tensor]:
    dtype = torch.float32 if x.dtype in REDUCED else x.dtype
    inputs = x.to(dtype)
    v = torch.full_like(inputs[0], spec.rest) if v0 is None else v0.to(dtype)
    q = w.to(dtype).sigmoid() if w is not None else None
    charge = NEURONS[spec.kind].charge
    fire = surrogate_function(spec.surrogate, spec.surrogate_alpha)
    spikes = []
    for current in inputs:
        h = charge(current, v, spec, q)
        spike = fire(h - spec.v_threshold)
        v = reset(h, spike, spec)
        spikes.append(spike)
    return torch.stack(spikes).to(x.dtype), v


def batch_norm(
    x: Tensor, running: tuple[Tensor, Tensor] | None, weight: Tensor | None, bias: Tensor | None, eps: float
) -> Tensor:
    """torch's, on ``[N, C, ...]``, with these statistics or those of `x`.

    Of a single frame in channels-last order torch 2.13 takes the gradient's memory order for the input's, and returns
    a wrong gradient without a word: such a frame goes in as rows ``[pixels, C]``.
    """
    mean, var = running or (None, None)
    rows = x.movedim(1, -1).reshape(-1, x.shape[1]) if len(x) == 1 else x
    y = F.batch_norm(rows, mean, var, weight, bias, training=running is None, eps=eps)
    return y.view(1, *x.shape[2:], x.shape[1]).movedim(-1, 1) if len(x) == 1 else y


def norm_pool_neuron(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running: tuple[Tensor, Tensor] | None,
    eps: float,
    spec: NeuronSpec,
    w: Tensor | None,
    pool: bool,
    time_steps: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """See :func:`megasnn.kernels.unit.norm_pool_neuron`.

    ``running``: mean and variance to normalise with, if not the batch's. Types that are half as wide save memory only
    because nothing but the input is kept: what is computed from it has the width of float32.
    """
    fire = partial(_normalised_spikes, running=running, eps=eps, spec=spec, pool=pool, time_steps=time_steps)
    (spikes,) = recomputed(fire, x, weight, bias, w) if x.dtype in REDUCED else fire(x, weight, bias, w)
    if running is not None:
        return spikes, *running
    with torch.no_grad():
        flat = _frames(x)
        over = [dim for dim in range(flat.ndim) if dim != 1]
        var, mean = torch.var_mean(flat, dim=over, correction=0)
    return spikes, mean, var


def _normalised_spikes(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    w: Tensor | None,
    running: tuple[Tensor, Tensor] | None,
    eps: float,
    spec: NeuronSpec,
    pool: bool,
    time_steps: int,
) -> tuple[Tensor]:
    y = batch_norm(_frames(x), running, weight, bias, eps)
    if pool:
        y = F.max_pool2d(y, kernel_size=3, stride=2, padding=1)
    y = y.unflatten(0, x.shape[:2]).expand(time_steps, *[-1] * (x.ndim - 1))
    spikes, _ = _neuron_multi_step(y, None, w, spec)
    return (spikes.to(x.dtype),)


def _frames(x: Tensor) -> Tensor:
    """``[T * N, C, ...]``, in float32 where the type is narrower."""
    return x.flatten(0, 1).float() if x.dtype in REDUCED else x.flatten(0, 1)
