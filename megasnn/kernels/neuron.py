"""Neurons without a norm: arguments are checked, a backend computes."""

from __future__ import annotations

import torch
from torch import Tensor

from megasnn.kernels.backends import AUTO_BACKEND, neuron_kernels
from megasnn.kernels.neuron_spec import NEURONS, NeuronSpec


def neuron_multi_step(
    x: Tensor,
    spec: NeuronSpec,
    v0: Tensor | None = None,
    w: Tensor | None = None,
    backend: str = AUTO_BACKEND,
) -> tuple[Tensor, Tensor]:
    """Computes a layer's neurons over all time steps.

    Args:
        x: input current ``[T, N, ...]``, in any memory order. On the meta device only shapes are computed.
        v0: membrane potential before the first step ``[N, ...]``; None for ``v_reset``, or 0 with a soft reset.
        w: a plif neuron's scalar parameter. A bispike neuron's amplitudes ``[T]``, without gradient; None for
            ``v_threshold``.

    Returns:
        Spikes, shaped and typed like ``x``, and the membrane potential ``[N, ...]`` after the last step.

    Raises:
        ValueError: an unknown backend, a plif neuron without ``w`` (or another with it), amplitudes for another number
            of time steps, or an unusable backend.
    """
    check_neuron(x, spec, w)
    if x.is_meta:
        return torch.empty_like(x), x.new_empty(x.shape[1:])
    return neuron_kernels(backend, x, spec).multi_step(x, v0, w)


def check_neuron(x: Tensor, spec: NeuronSpec, w: Tensor | None) -> None:
    """Raises ValueError for an input that is not floating-point, a missing `w`, or one too many."""
    if not x.is_floating_point():
        raise ValueError(f"a neuron takes floating-point input [T, N, ...], got {x.dtype} {tuple(x.shape)}")
    if (w is not None) != NEURONS[spec.kind].learns and not NEURONS[spec.kind].ternary:
        learning = ", ".join(name for name, neuron in NEURONS.items() if neuron.learns)
        raise ValueError(f"w is the parameter of a {learning} neuron and of no other; got kind {spec.kind!r} and w={w}")
