"""Neurons without a norm by compiled kernels, one call for the forward and one for the backward."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megasnn.kernels.neuron_spec import NeuronSpec
from megasnn.kernels.norm_neuron_kernels import Intermediate, NeuronInput, NormNeuronKernels, gradient_of_w
from megasnn.kernels.spike_codec import pack_bits, remember_bits, wants_bits


class CompiledKernels(NormNeuronKernels[Intermediate]):
    """Kernels with their own backward for neurons without a norm."""

    @abstractmethod
    def fire_alone(self, inputs: NeuronInput, packed: bool) -> tuple[Tensor, Tensor, Tensor | None]:
        """Spikes, last potential and, with `packed` and where a step fills whole bytes, the spikes' bits."""

    @abstractmethod
    def backward_alone(
        self, inputs: NeuronInput, g_spikes: Tensor, g_last: Tensor | None, learn: bool
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Gradients with respect to x and v0, and with `learn` the sum for `gradient_of_w`."""

    def neuron_multi_step(
        self, x: Tensor, spec: NeuronSpec, v0: Tensor | None, w: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        spikes, last, bits = _CompiledNeuron.apply(x, v0, w, spec, wants_bits(x), self)
        return remember_bits(spikes, bits), last


class _CompiledNeuron(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        v0: Tensor | None,
        w: Tensor | None,
        spec: NeuronSpec,
        packed: bool,
        kernels: CompiledKernels[Any],
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        ctx.set_materialize_grads(False)
        ctx.spec = spec
        ctx.kernels = kernels
        ctx.save_for_backward(x, v0, w)
        inputs = NeuronInput(_channels_fastest(x, 2), _channels_fastest(v0, 1), w, spec)
        spikes, last, bits = kernels.fire_alone(inputs, packed)
        if packed:
            if bits is None:
                bits = pack_bits(spikes)
            ctx.mark_non_differentiable(bits)
        return spikes.movedim(-1, min(2, x.ndim - 1)), last.movedim(-1, min(1, last.ndim - 1)), bits

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g_spikes: Tensor | None, g_last: Tensor | None, _: None) -> tuple[Tensor | None, ...]:
        x, v0, w = ctx.saved_tensors
        _, need_v0, need_w, *_ = ctx.needs_input_grad
        if g_spikes is None:
            g_spikes = torch.zeros_like(x)
        inputs = NeuronInput(_channels_fastest(x, 2), _channels_fastest(v0, 1), w, ctx.spec)
        g_x, g_v, total = ctx.kernels.backward_alone(
            inputs, _channels_fastest(g_spikes, 2), _channels_fastest(g_last, 1), need_w
        )
        g_x = g_x.movedim(-1, min(2, x.ndim - 1))
        g_v0 = None
        if need_v0:
            g_v0 = g_v.movedim(-1, min(1, v0.ndim - 1)).to(v0.dtype)
        g_w = gradient_of_w(total, w, ctx.spec) if need_w else None
        return g_x, g_v0, g_w, None, None, None


def _channels_fastest(x: Any, dim: int) -> Any:
    """Moves dimension `dim`, or the last one, to the end of a contiguous tensor; None stays."""
    if x is None:
        return None
    return x.detach().movedim(min(dim, x.ndim - 1), -1).contiguous()
