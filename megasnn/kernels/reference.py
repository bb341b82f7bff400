"""The neuron and the norm-(pool-)neuron unit in plain PyTorch: the truth that every faster kernel must equal.

Charge, fire and reset do the arithmetic of SpikingJelly 2.0.0 (``spikingjelly/_ops``) in its order.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from megasnn.kernels.spec import NEURONS, SURROGATES, NeuronSpec

REDUCED = (torch.bfloat16, torch.float16)


@cache
def surrogate_function(name: str, alpha: float) -> Callable[[Tensor], Tensor]:
    """SpikingJelly's surrogate function of that name: a step forward, its smooth gradient backward."""
    from spikingjelly.activation_based import surrogate

    function = getattr(surrogate, SURROGATES[name].spikingjelly)
    return function(alpha=alpha)


def reset(h: Tensor, spike: Tensor, spec: NeuronSpec) -> Tensor:
    """Membrane potential after firing."""
    if spec.detach_reset:
        spike = spike.detach()
    if spec.v_reset is None:
        return h - spike * spec.v_threshold
    return spike * spec.v_reset + (1.0 - spike) * h


def neuron_multi_step(x: Tensor, spec: NeuronSpec, v0: Tensor | None, w: Tensor | None) -> tuple[Tensor, Tensor]:
    """See :func:`megasnn.kernels.unit.neuron_multi_step`."""
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

    ``running``: mean and variance to normalise with, if not the batch's.
    """
    flat = x.flatten(0, 1)
    flat = flat.float() if x.dtype in REDUCED else flat
    if running is None:
        with torch.no_grad():
            over = [dim for dim in range(flat.ndim) if dim != 1]
            var, mean = torch.var_mean(flat, dim=over, correction=0)
        y = F.batch_norm(flat, None, None, weight, bias, training=True, eps=eps)
    else:
        mean, var = running
        y = F.batch_norm(flat, mean, var, weight, bias, training=False, eps=eps)
    if pool:
        y = F.max_pool2d(y, kernel_size=3, stride=2, padding=1)
    y = y.unflatten(0, x.shape[:2]).expand(time_steps, *[-1] * (x.ndim - 1))
    spikes, _ = neuron_multi_step(y, spec, None, w)
    return spikes.to(x.dtype), mean, var
