"""Bi-spiking neurons by compiled loops on the CPU."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from megasnn.kernels.bispike import CompiledBiSpike, scales_of
from megasnn.kernels.layout import empty_array
from megasnn.kernels.numba import bispike_loops
from megasnn.kernels.numba.jit import run_kernel
from megasnn.kernels.torch_backend import computed_in

_BLOCK = 1024  # neurons: with their steps they stay in the L1 cache


class NumbaBiSpike(CompiledBiSpike):
    def fire(
        self, x: Tensor, v0: Tensor | None, amplitude: Tensor, packed: bool
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        data = x.to(computed_in(x)).numpy()
        steps, size = data.shape
        spikes = empty_array(data.shape, data.dtype)
        last = np.empty((1, size), data.dtype)
        row = -(-size // 8) if packed else 0
        places = empty_array((2 * steps * row,), np.dtype(np.uint8))
        inside = empty_array((steps * row,), np.dtype(np.uint8))
        first = None if v0 is None else v0.view(1, -1).numpy()
        scales = scales_of(amplitude).numpy()
        one = data.dtype.type(1)
        blocks = -(-size // _BLOCK)
        run_kernel(bispike_loops.fire_ternary, blocks, data, first, last, spikes, places, inside, scales, one, _BLOCK)
        fired = torch.from_numpy(spikes).to(x.dtype)
        return fired, torch.from_numpy(last), torch.from_numpy(places), torch.from_numpy(inside)

    def backward(
        self, places: Tensor, inside: Tensor, amplitude: Tensor, g_spikes: Tensor, g_last: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        upstream = g_spikes.to(computed_in(g_spikes)).numpy()
        g_x = empty_array(upstream.shape, upstream.dtype)
        last = None if g_last is None else g_last.view(1, -1).numpy()
        scales = scales_of(amplitude).numpy()
        one = upstream.dtype.type(1)
        blocks = -(-upstream.shape[1] // _BLOCK)
        run_kernel(
            bispike_loops.back_ternary, blocks, upstream, last, g_x, places.numpy(), inside.numpy(), scales, one, _BLOCK
        )
        gradient = torch.from_numpy(g_x)
        return gradient.to(g_spikes.dtype), gradient[0]
