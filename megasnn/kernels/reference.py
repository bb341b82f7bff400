"""The neuron and the norm-(pool-)neuron unit in plain PyTorch: the truth that every faster kernel must equal.

Charge, fire and reset do the arithmetic of SpikingJelly 2.0.0 (``spikingjelly/_ops``) in its order.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from megasnn.kernels.spec import SURROGATES, NeuronSpec

REDUCED = (torch.bfloat16, torch.float16)


@cache
def surrogate_function(name: str, alpha: float) -> Callable[[Tensor], Tensor]:
    """SpikingJelly's surrogate function of that name: a step forward, its smooth gradient backward."""
    from spikingjelly.activation_based import surrogate

    function = getattr(surrogate, SURROGATES[name][0])
    return function(alpha=alpha)


def charge(x: Tensor, v: Tensor, spec: NeuronSpec, q: Tensor | None) -> Tensor:
    """Membrane potential before firing; ``q`` is ``sigmoid(w)`` of a plif neuron."""
    if spec.kind == "if":
        return v + x
    if q is not None:
        return v + (x - (v - spec.rest)) * q if spec.decay_input else v - (v - spec.rest) * q + x
    return v + (x - (v - spec.rest)) / spec.tau if spec.decay_input else v - (v - spec.rest) / spec.tau + x


def reset(h: Tensor, spike: Tensor, spec: NeuronSpec) -> Tensor:
    """Membrane potential after firing."""
    if spec.detach_reset:
        spike = spike.detach()
    if spec.v_reset is None:
        return h - spike * spec.v_threshold
    return spike * spec.v_reset + (1.0 - spike) * h


def neuron_multi_step_reference(
    x: Tensor, spec: NeuronSpec, v0: Tensor | None = None, w: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """See :func:`megasnn.kernels.neuron_multi_step`."""
    dtype = torch.float32 if x.dtype in REDUCED else x.dtype
    inputs = x.to(dtype)
    v = torch.full_like(inputs[0], spec.rest) if v0 is None else v0.to(dtype)
    q = w.to(dtype).sigmoid() if w is not None else None
    fire = surrogate_function(spec.surrogate, spec.surrogate_alpha)
    spikes = []
    for current in inputs:
        h = charge(current, v, spec, q)
        spike = fire(h - spec.v_threshold)
        v = reset(h, spike, spec)
        spikes.append(spike)
    return torch.stack(spikes).to(x.dtype), v


def norm_pool_neuron_reference(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    training: bool,
    eps: float,
    spec: NeuronSpec,
    w: Tensor | None,
    pool: bool,
    time_steps: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """See :func:`megasnn.kernels.norm_pool_neuron`."""
    flat = x.flatten(0, 1)
    flat = flat.float() if x.dtype in REDUCED else flat
    if training or running_mean is None or running_var is None:
        with torch.no_grad():
            over = [dim for dim in range(flat.ndim) if dim != 1]
            var, mean = torch.var_mean(flat, dim=over, correction=0)
        y = F.batch_norm(flat, None, None, weight, bias, training=True, eps=eps)
    else:
        mean, var = running_mean, running_var
        y = F.batch_norm(flat, mean, var, weight, bias, training=False, eps=eps)
    if pool:
        y = F.max_pool2d(y, kernel_size=3, stride=2, padding=1)
    y = y.unflatten(0, x.shape[:2]).expand(time_steps, *[-1] * (x.ndim - 1))
    spikes, _ = neuron_multi_step_reference(y, spec, None, w)
    return spikes.to(x.dtype), mean, var
