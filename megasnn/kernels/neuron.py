"""Neurons alone: arguments are checked, a backend computes."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megasnn.kernels.backends import AUTO_BACKEND, backend_for
from megasnn.kernels.neuron_spec import NEURONS, NeuronSpec
from megasnn.kernels.spike_codec import pack_bits, remember_bits, wants_bits


def neuron_multi_step(
    x: Tensor,
    spec: NeuronSpec,
    v0: Tensor | None = None,
    w: Tensor | None = None,
    backend: str = AUTO_BACKEND,
) -> tuple[Tensor, Tensor]:
    """A layer of neurons over all time steps.

    Args:
        x: input current ``[T, N, ...]``, in any memory order. On the meta device only shapes are computed.
        v0: membrane potential before the first step ``[N, ...]``; without it ``v_reset``, or 0 with a soft reset.
        w: the parameter of a plif neuron, a scalar.

    Returns:
        Spikes, shaped and typed like ``x``, and the membrane potential ``[N, ...]`` after the last step.

    Raises:
        ValueError: an unknown backend, a plif neuron without ``w`` (or another with it), or a backend that cannot be
            used here.
    """
    check_neuron(x, spec, w)
    if x.is_meta:
        return torch.empty_like(x), x.new_empty(x.shape[1:])
    return backend_for(backend, x, spec).neuron_multi_step(x, spec, v0, w)


def neuron_by(
    calls: ModuleType, x: Tensor, spec: NeuronSpec, v0: Tensor | None, w: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Neurons alone by loops or kernels; see `neuron_multi_step`.

    Args:
        calls: has `fire_alone` and `backward_alone`. These take contiguous tensors `[T, N, ..., C]` and steps
            `[N, ..., C]`. They give spikes, last potential, and bits where they fill whole bytes; gradients of x and
            v0, and what `gradient_of_w` takes.
    """
    spikes, last, bits = _Neuron.apply(x, v0, w, spec, wants_bits(x), calls)
    return remember_bits(spikes, bits), last


class _Neuron(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        v0: Tensor | None,
        w: Tensor | None,
        spec: NeuronSpec,
        packed: bool,
        calls: ModuleType,
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        ctx.set_materialize_grads(False)
        ctx.spec, ctx.calls = spec, calls
        ctx.save_for_backward(x, v0, w)
        spikes, last, bits = calls.fire_alone(_rows(x, 2), _rows(v0, 1), w, spec, packed)
        if packed:
            bits = pack_bits(spikes) if bits is None else bits
            ctx.mark_non_differentiable(bits)
        return spikes.movedim(-1, min(2, x.ndim - 1)), last.movedim(-1, min(1, last.ndim - 1)), bits

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g_spikes: Tensor | None, g_last: Tensor | None, _: None) -> tuple[Tensor | None, ...]:
        x, v0, w = ctx.saved_tensors
        need_x, need_v, need_w, *_ = ctx.needs_input_grad
        g_spikes = torch.zeros_like(x) if g_spikes is None else g_spikes
        inputs = _rows(x, 2), _rows(v0, 1), _rows(g_spikes, 2), _rows(g_last, 1)
        g_x, g_before, total = ctx.calls.backward_alone(*inputs, w, ctx.spec, need_w)
        return (
            g_x.movedim(-1, min(2, x.ndim - 1)) if need_x else None,
            g_before.movedim(-1, min(1, v0.ndim - 1)).to(v0.dtype) if need_v else None,
            gradient_of_w(total, w, ctx.spec) if need_w else None,
            *(None,) * 3,
        )


def _rows(x: Any, dim: int) -> Any:
    """A tensor with its channels, in that dimension or the last one there is, last and contiguous; of None, None."""
    return None if x is None else x.detach().movedim(min(dim, x.ndim - 1), -1).contiguous()


def gradient_of_w(total: Tensor, w: Tensor, spec: NeuronSpec) -> Tensor:
    """The gradient of a learned time constant's w from what kernels sum, which lacks a factor; q = sigmoid(w)."""
    q = w.detach().double().sigmoid()
    factor = (1 - q) / q if spec.decay_input else q * (1 - q)
    return (total * factor).view(w.shape).to(w.dtype)


def check_neuron(x: Tensor, spec: NeuronSpec, w: Tensor | None) -> None:
    """Raises ValueError for input that is no current, and a parameter that does not belong to the neuron."""
    if not x.is_floating_point():
        raise ValueError(f"a neuron takes floating-point input [T, N, ...], got {x.dtype} {tuple(x.shape)}")
    if (w is not None) != NEURONS[spec.kind].learns:
        learning = ", ".join(name for name, neuron in NEURONS.items() if neuron.learns)
        raise ValueError(f"w is the parameter of a {learning} neuron and of no other; got kind {spec.kind!r} and w={w}")
