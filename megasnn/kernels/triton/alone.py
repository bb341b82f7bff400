"""A layer of neurons without a norm before it, with a potential that may come from the call before."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megasnn.kernels.layout import memory_order
from megasnn.kernels.neuron import gradient_of_w
from megasnn.kernels.neuron_spec import NeuronSpec, numbers
from megasnn.kernels.spike_codec import pack_bits, remember_bits, wants_bits
from megasnn.kernels.triton.calls import factor
from megasnn.kernels.triton.launch import NUMBERS, THREADS, at_once, chunk, chunk_memory, compute_type, lanes, launch
from megasnn.kernels.triton.unit import fire_kernel, gradient_kernel


def neuron_multi_step(x: Tensor, spec: NeuronSpec, v0: Tensor | None, w: Tensor | None) -> tuple[Tensor, Tensor]:
    """See :func:`megasnn.kernels.neuron.neuron_multi_step`."""
    spikes, last, bits = _Neuron.apply(x, v0, w, spec, wants_bits(x))
    return remember_bits(spikes, bits), last


class _Neuron(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, v0: Tensor | None, w: Tensor | None, spec: NeuronSpec, packed: bool
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        order, number = _Order(x), compute_type(x.dtype)
        data, first = order.take(x), None if v0 is None else order.take_step(v0)
        spikes, last = torch.empty_like(data), torch.empty_like(data[0], dtype=number)
        block, size = THREADS * lanes(x.dtype), data[0].numel()
        bits = data.new_empty(spikes.numel() // 8, dtype=torch.uint8) if packed and size % 8 == 0 else None
        launch(
            fire_kernel, -(-size // block),
            data, None, first, factor(w, number), spikes, bits, last, size, size, size, 0, 0, 0,
            T=len(x), REPEATED=False, POOL=False, N=numbers(spec), D=NUMBERS[number],
            AT_ONCE=at_once(len(x)), BLOCK=block,
        )  # fmt: skip
        ctx.set_materialize_grads(False)
        ctx.spec = spec
        ctx.save_for_backward(x, v0, w)
        if packed and bits is None:
            bits = pack_bits(spikes)
        if bits is not None:
            ctx.mark_non_differentiable(bits)
        return order.give(spikes), order.give_step(last), bits

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g_spikes: Tensor | None, g_last: Tensor | None, _: None) -> tuple[Tensor | None, ...]:
        x, v0, w = ctx.saved_tensors
        need_x, need_v, need_w, *_ = ctx.needs_input_grad
        order, number = _Order(x), compute_type(x.dtype)
        data, first = order.take(x), None if v0 is None else order.take_step(v0)
        g = torch.zeros_like(data) if g_spikes is None else order.take(g_spikes)
        g_after = None if g_last is None else order.take_step(g_last)
        block, size = THREADS * lanes(x.dtype, len(x)), data[0].numel()
        programs = -(-size // block)
        g_x = torch.empty_like(data)
        g_before = torch.empty_like(data[0], dtype=number) if need_v else None
        totals = data.new_empty(programs, dtype=torch.float64) if need_w else None
        launch(
            gradient_kernel, programs,
            data, g, g_x, None, first, g_after, g_before, factor(w, number), totals, chunk_memory(x, len(x), size),
            size, size,
            T=len(x), CHUNK=chunk(x.dtype, len(x)), REPEATED=False, BATCH=False, N=numbers(ctx.spec),
            D=NUMBERS[number], BLOCK=block,
        )  # fmt: skip
        return (
            order.give(g_x) if need_x else None,
            None if g_before is None else order.give_step(g_before).to(v0.dtype),
            None if totals is None else gradient_of_w(totals.sum(), w, ctx.spec),
            None,
            None,
        )


class _Order:
    """The memory order of a tensor `[T, ...]`: others are brought into it, and copied only where they are not."""

    def __init__(self, x: Tensor) -> None:
        self.step = memory_order(x[0])
        self.whole = [0, *(dim + 1 for dim in self.step)]

    def take(self, x: Tensor) -> Tensor:
        return x.detach().permute(self.whole).contiguous()

    def take_step(self, v: Tensor) -> Tensor:
        return v.detach().permute(self.step).contiguous()

    def give(self, x: Tensor) -> Tensor:
        return x.permute(_inverse(self.whole))

    def give_step(self, v: Tensor) -> Tensor:
        return v.permute(_inverse(self.step))


def _inverse(order: list[int]) -> list[int]:
    return [order.index(dim) for dim in range(len(order))]
