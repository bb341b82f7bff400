"""A layer of neurons without a norm before it, with a potential that may come from the call before."""

from __future__ import annotations

import sys
from functools import partial

import torch
from torch import Tensor

from megasnn.kernels.neuron import neuron_by
from megasnn.kernels.neuron_spec import NeuronSpec, numbers
from megasnn.kernels.triton.calls import factor
from megasnn.kernels.triton.launch import (
    NUMBERS,
    THREADS,
    at_once,
    chunk,
    chunk_memory,
    compute_type,
    lanes,
    lanes_of_backward,
    launch,
)
from megasnn.kernels.triton.unit import fire_kernel, gradient_kernel

neuron_multi_step = partial(neuron_by, sys.modules[__name__])


def fire_alone(
    x: Tensor, v0: Tensor | None, w: Tensor | None, spec: NeuronSpec, packed: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    """See `megasnn.kernels.neuron.neuron_by`."""
    number, block, size = compute_type(x.dtype), THREADS * lanes(x.dtype), x[0].numel()
    spikes, last = torch.empty_like(x), torch.empty_like(x[0], dtype=number)
    bits = x.new_empty(spikes.numel() // 8, dtype=torch.uint8) if packed and size % 8 == 0 else None
    launch(
        fire_kernel, -(-size // block),
        x, None, v0, factor(w, number), spikes, bits, last, size, size, size, 0, 0, 0,
        T=len(x), REPEATED=False, POOL=False, N=numbers(spec), D=NUMBERS[number], AT_ONCE=at_once(len(x)), BLOCK=block,
    )  # fmt: skip
    return spikes, last, bits


def backward_alone(
    x: Tensor,
    v0: Tensor | None,
    g_spikes: Tensor,
    g_last: Tensor | None,
    w: Tensor | None,
    spec: NeuronSpec,
    learn: bool,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    number, block, size = compute_type(x.dtype), THREADS * lanes_of_backward(x.dtype, len(x)), x[0].numel()
    programs = -(-size // block)
    g_x, g_first = torch.empty_like(x), torch.empty_like(x[0], dtype=number) if v0 is not None else None
    totals = x.new_empty(programs, dtype=torch.float64) if learn else None
    launch(
        gradient_kernel, programs,
        x, g_spikes, g_x, None, v0, g_last, g_first, factor(w, number), totals, chunk_memory(x, len(x), size),
        size, size,
        T=len(x), CHUNK=chunk(x.dtype, len(x)), REPEATED=False, BATCH=False, N=numbers(spec), D=NUMBERS[number],
        BLOCK=block,
    )  # fmt: skip
    return g_x, g_first, None if totals is None else totals.sum()
