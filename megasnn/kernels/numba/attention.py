"""Attention without softmax on a CPU, from the bits of q, k and v, in time that grows with the spikes."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from megasnn.kernels.layout import empty
from megasnn.kernels.numba import attention_loops as loops
from megasnn.kernels.numba.jit import run
from megasnn.kernels.numba.spike_sums import TYPES


@dataclass(frozen=True)
class SpikingHeads:
    """The spikes of q, k and v of some heads, `d` channels each, and the products of attention, in this order.

    Sums of spikes are whole numbers, and exact. Those of gradients are added in the order of tokens and of channels.

    Attributes:
        bits: `[frames L, 3 heads d / 8]`, packed, channels last: all heads of q, then of k and of v.
        sizes: L, heads, d.
        dtype: of outputs and gradients.
        scale: of the output.
    """

    bits: np.ndarray
    sizes: tuple[int, int, int]
    dtype: torch.dtype
    scale: float

    @property
    def units(self) -> int:
        """Heads of all frames."""
        return len(self.bits) // self.sizes[0] * self.sizes[1]

    def counts(self) -> Tensor:
        """k^T v, `[frames, heads, d, d]`."""
        kv = self._matrices()
        run(loops.counts, self.units, _rows(kv), self.bits, self._cuts(), self.sizes)
        return kv

    def output(self, kv: Tensor) -> Tensor:
        """q (k^T v) times the scale: rows `[frames L, heads d]`."""
        out = self._empty(self.sizes[1] * self.sizes[2])
        run(loops.applied, self.units, out.numpy(), self.bits, _rows(kv), self._cuts(), self.sizes, self._scale())
        return out

    def prepared(self, grad: Tensor) -> Tensor:
        """The gradient of the output, as the next two methods take it."""
        return grad.contiguous()

    def gradient_of_counts(self, grad: Tensor) -> Tensor:
        """Gradient of k^T v."""
        of_kv, arrays = self._matrices(), (self.bits, grad.numpy())
        run(loops.gradient_of_counts, self.units, _rows(of_kv), *arrays, self._cuts(), self.sizes, self._scale())
        return of_kv

    def gradient_of_q(self, grad: Tensor, kv: Tensor) -> Tensor:
        """Buffer for the gradients of q, k and v, rows `[frames L, 3 heads d]`; the first is there."""
        out, arrays = self._empty(3 * self.sizes[1] * self.sizes[2]), (grad.numpy(), _turned(kv))
        run(loops.gradient_of_q, self.units, out.numpy(), *arrays, self._cuts(), self.sizes, self._scale())
        return out

    def gradients(self, with_q: Tensor, of_kv: Tensor) -> Tensor:
        """Gradients of q, k and v. Args: with_q: what `gradient_of_q` gave. of_kv: the gradient of k^T v."""
        arrays = self.bits, _rows(of_kv), _turned(of_kv)
        run(loops.gradients_of_k_and_v, self.units, with_q.numpy(), *arrays, self._cuts(), self.sizes)
        return with_q

    def _matrices(self) -> Tensor:
        tokens, heads, d = self.sizes
        return torch.empty(len(self.bits) // tokens, heads, d, d, dtype=self.dtype)

    def _empty(self, columns: int) -> Tensor:
        return empty((len(self.bits), columns), self.dtype, torch.device("cpu"))

    def _scale(self) -> np.generic:
        """As a number of the type that is computed in, as the loops take it."""
        return torch.tensor(self.scale, dtype=self.dtype).numpy().flat[0]

    def _cuts(self) -> np.ndarray:
        """Blocks of columns of a head, as few as can be: the first column of each, and its bytes. `[blocks, 2]`."""
        found, at, itemsize = [], 0, self.dtype.itemsize
        while at < self.sizes[2]:
            left = (self.sizes[2] - at) * itemsize
            found.append((at, next(size for size in loops.BLOCKS if size <= left)))
            at += found[-1][1] // itemsize
        return np.array(found)


def spiking_heads(
    bits: Tensor, rows: torch.Size, frames: int, heads: int, dtype: torch.dtype, scale: float
) -> SpikingHeads | None:
    """Heads of packed spikes of q, k and v, rows `[frames L, 3 heads d]`; None where loops do not take them."""
    d = rows[1] // (3 * heads)
    if bits.device.type != "cpu" or dtype not in TYPES or d % 8 or not rows.numel():
        return None
    sizes = rows[0] // frames, heads, d
    return SpikingHeads(bits.numpy().reshape(rows[0], rows[1] // 8), sizes, dtype, scale)


def _rows(matrices: Tensor) -> np.ndarray:
    """`[frames, heads, d, d]` as `[frames heads d, d]`, the same memory."""
    return matrices.view(-1, matrices.shape[-1]).numpy()


def _turned(matrices: Tensor) -> np.ndarray:
    return _rows(matrices.transpose(-2, -1).contiguous())
