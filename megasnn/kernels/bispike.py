"""The elastic bi-spiking neuron of SpikeLM (arXiv 2406.03287): it fires -1, 0 or 1.

With the input x_t, the amplitude a_t and m_0 = x_0:

    m_t = m_{t-1} 0.25 (a_{t-1} - a_{t-1} s_{t-1}) + x_t      s_t = round(clip(m_t / a_t, -1, 1)), half to even
    ds/dm = 1 / a_t where |m_t| <= a_t, else 0                 the s of the reset has no gradient

The authors' spikes are a_t s_t, with the gradient 1 (Xingrun-Xing/SpikeLM, spikeLM-BERT/spiking.py). Here a spike has
no amplitude: it stays exact in two bits, and a layer that needs a_t s_t multiplies. A spike of -1 does not reset: it
doubles the potential that is carried on.

The state between time steps is v = m 0.25 (a - a s), so that m_t = v + x_t.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

import torch
from torch import Tensor

from megasnn.common.autograd import Function, refuse_second_derivative
from megasnn.kernels.compiled_neuron import channels_fastest
from megasnn.kernels.neuron_spec import NeuronSpec
from megasnn.kernels.norm_neuron_kernels import NeuronKernels
from megasnn.kernels.spike_codec import Content, pack_ternary, remember_bits, wants_bits

DECAY = 0.25
"""Share of the potential that the next time step gets from a neuron that did not fire, for an amplitude of 1."""


def amplitudes_of(amplitude: Tensor | None, spec: NeuronSpec, like: Tensor, dtype: torch.dtype) -> Tensor:
    """Amplitudes of an input's time steps, `[T]`; by default `v_threshold` at each.

    Raises ValueError for another number of time steps.
    """
    if amplitude is None:
        return torch.full((len(like),), spec.v_threshold, dtype=dtype, device=like.device)
    if amplitude.shape != (len(like),):
        raise ValueError(f"a {spec.kind} neuron has {amplitude.numel()} amplitudes for {len(like)} time steps")
    return amplitude.detach().to(dtype)


def scales_of(amplitude: Tensor) -> Tensor:
    """Factors `[4, T]`: a, a / 2, a / 4 and 1 / a.

    The next time step gets a / 2 of the potential after a spike of -1, and a / 4 without a spike.
    """
    return torch.stack([amplitude, 0.5 * amplitude, DECAY * amplitude, amplitude.reciprocal()])


class CompiledBiSpike(NeuronKernels):
    """Kernels with their own backward, which reads three bits a value: the packed spike, and |m| <= a.

    Packed arrays `[..., T, ceil(M / 8)]` have a row of bytes for each time step's M values, the first one's bit lowest.
    """

    @abstractmethod
    def fire(
        self, x: Tensor, v0: Tensor | None, amplitude: Tensor, packed: bool
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Fires on an input `[T, M]`.

        Returns:
            Spikes `[T, M]` and last potential `[M]`. Packed arrays: the places of 1 and of -1, `[2, T, ...]`, and of
            |m| <= a, `[T, ...]`; empty without `packed`.
        """

    @abstractmethod
    def backward(
        self, places: Tensor, inside: Tensor, amplitude: Tensor, g_spikes: Tensor, g_last: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Gradients of x and of v0, from the gradients of the spikes `[T, M]` and the last potential `[M]`."""

    def multi_step(self, x: Tensor, v0: Tensor | None, w: Tensor | None) -> tuple[Tensor, Tensor]:
        number = torch.float64 if x.dtype == torch.float64 else torch.float32
        amplitude = amplitudes_of(w, self.spec, x, number)
        spikes, last, bits = _BiSpike.apply(x, v0, amplitude, torch.is_grad_enabled(), self)
        if not wants_bits(x):
            bits = None
        return remember_bits(spikes, bits, Content.TERNARY), last


class _BiSpike(Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, v0: Tensor | None, amplitude: Tensor, packed: bool, kernels: CompiledBiSpike
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        ctx.set_materialize_grads(False)
        rows = channels_fastest(x, 2)
        shape = rows.shape
        first = None if v0 is None else channels_fastest(v0, 1).view(-1).to(amplitude.dtype)
        spikes, last, places, inside = kernels.fire(rows.view(len(x), -1), first, amplitude, packed)
        spikes = spikes.view(shape).movedim(-1, min(2, x.ndim - 1))
        last = last.view(shape[1:])
        last = last.movedim(-1, min(1, last.ndim - 1))
        bits: Tensor | None = None
        if packed:
            # The rows of whole bytes are the spikes as packed for the next layer: one copy serves both.
            fills_bytes = shape[1:].numel() % 8 == 0
            bits = places.view(-1) if fills_bytes else pack_ternary(spikes)
            places = bits if fills_bytes else places
        ctx.kernels = kernels
        ctx.shape = shape
        ctx.save_for_backward(places, inside, amplitude)
        return spikes, last, bits

    @staticmethod
    def backward(ctx: Any, g_spikes: Tensor | None, g_last: Tensor | None, _: None) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            refuse_second_derivative()
        places, inside, amplitude = ctx.saved_tensors
        kernels: CompiledBiSpike = ctx.kernels
        shape: torch.Size = ctx.shape
        steps = shape[0]
        if g_spikes is None:
            rows = inside.new_zeros((steps, shape[1:].numel()), dtype=kernels.dtype)
        else:
            rows = channels_fastest(g_spikes, 2).view(steps, -1)
        if g_last is not None:
            g_last = channels_fastest(g_last, 1).view(-1).to(amplitude.dtype)
        g_x, g_first = kernels.backward(places.view(2, steps, -1), inside, amplitude, rows, g_last)
        g_x = g_x.view(shape).movedim(-1, min(2, len(shape) - 1))
        g_v0 = None
        if ctx.needs_input_grad[1]:
            g_v0 = g_first.view(shape[1:])
            g_v0 = g_v0.movedim(-1, min(1, g_v0.ndim - 1))
        return g_x, g_v0, None, None, None
