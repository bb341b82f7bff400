"""Neurons without a norm by compiled kernels, one call for the forward and one for the backward."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

import torch
from torch import Tensor

from megasnn.common.autograd import Function, refuse_second_derivative
from megasnn.kernels.norm_neuron_kernels import NeuronInput, NeuronKernels, gradient_of_w
from megasnn.kernels.spike_codec import pack_bits, remember_bits, wants_bits


class CompiledNeuron(NeuronKernels):
    """Kernels with their own backward."""

    @abstractmethod
    def fire(self, inputs: NeuronInput, packed: bool) -> tuple[Tensor, Tensor, Tensor | None]:
        """Spikes, last potential and, with `packed` and where a step fills whole bytes, the spikes' bits."""

    @abstractmethod
    def backward(
        self, inputs: NeuronInput, g_spikes: Tensor, g_last: Tensor | None, learn: bool
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Gradients with respect to x and v0, and with `learn` the sum for `gradient_of_w`."""

    def multi_step(self, x: Tensor, v0: Tensor | None, w: Tensor | None) -> tuple[Tensor, Tensor]:
        spikes, last, bits = _CompiledNeuron.apply(x, v0, w, wants_bits(x), self)
        return remember_bits(spikes, bits), last


class _CompiledNeuron(Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, v0: Tensor | None, w: Tensor | None, packed: bool, kernels: CompiledNeuron
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        ctx.set_materialize_grads(False)
        ctx.kernels = kernels
        ctx.save_for_backward(x, v0, w)
        first = None if v0 is None else channels_fastest(v0, 1)
        inputs = NeuronInput(channels_fastest(x, 2), first, w)
        spikes, last, bits = kernels.fire(inputs, packed)
        if packed and bits is None:
            bits = pack_bits(spikes)
        return spikes.movedim(-1, min(2, x.ndim - 1)), last.movedim(-1, min(1, last.ndim - 1)), bits

    @staticmethod
    def backward(ctx: Any, g_spikes: Tensor | None, g_last: Tensor | None, _: None) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            refuse_second_derivative()
        # The input alone was stored: the kernels compute the potentials again.
        kernels: CompiledNeuron = ctx.kernels
        x, v0, w = ctx.saved_tensors
        _, need_v0, need_w, *_ = ctx.needs_input_grad
        if g_spikes is None:
            # The loss may depend on the last potential alone.
            g_spikes = torch.zeros_like(x)
        first = None if v0 is None else channels_fastest(v0, 1)
        inputs = NeuronInput(channels_fastest(x, 2), first, w)
        if g_last is not None:
            g_last = channels_fastest(g_last, 1)
        g_x, g_v, total = kernels.backward(inputs, channels_fastest(g_spikes, 2), g_last, need_w)
        g_x = g_x.movedim(-1, min(2, x.ndim - 1))
        g_v0 = None
        if need_v0:
            assert g_v is not None
            g_v0 = g_v.movedim(-1, min(1, v0.ndim - 1)).to(v0.dtype)
        g_w = None
        if need_w:
            assert total is not None
            g_w = gradient_of_w(total, w, kernels.spec)
        return g_x, g_v0, g_w, None, None


def channels_fastest(x: Tensor, dim: int) -> Tensor:
    """Moves dimension `dim`, or the last one, to the end of a contiguous tensor."""
    return x.detach().movedim(min(dim, x.ndim - 1), -1).contiguous()
