"""Bi-spiking neurons by Triton kernels, in one pass over memory each.

They must equal torch_backend.py's. Packed arrays have `row = ceil(M / 8)` bytes for each time step. `scales [4, T]`:
see `megasnn.kernels.bispike`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from megasnn.kernels.bispike import CompiledBiSpike, scales_of
from megasnn.kernels.neuron_spec import NeuronSpec
from megasnn.kernels.triton.launch import THREADS, TRITON_TYPES, Launch, compute_type, lanes_of_type


@triton.jit
def packed_bits(flags, BLOCK: tl.constexpr):
    """`[BLOCK]` flags as `[BLOCK / 8]` bytes, the first flag lowest."""
    eight = tl.reshape(flags.to(tl.int32), [BLOCK // 8, 8]) << tl.arange(0, 8)[None, :]
    return tl.sum(eight, axis=1).to(tl.uint8)


@triton.jit
def bits_at(packed, place, inside):
    """Flags at these places."""
    byte = tl.load(packed + place // 8, mask=inside, other=0).to(tl.int32)
    return ((byte >> (place % 8)) & 1) != 0


@triton.jit
def carried(above, below, scales, T: tl.constexpr, D: tl.constexpr):
    """Factor of m in the next time step's m: a / 4, a / 2 after -1, 0 after 1."""
    half = tl.load(scales + T)
    quarter = tl.load(scales + 2 * T)
    return tl.where(above, tl.zeros((), D), tl.where(below, half, quarter))


@triton.jit
def fire_ternary_kernel(x, v_first, v_last, spikes, places, within, scales, size, row,
                        T: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """Ternary spikes and last potentials.

    Args:
        places: `[2, T, row]`, spikes of 1 and of -1, packed, or None.
        within: `[T, row]`, potentials with |m| <= a, packed.
    """
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = place < size
    byte = tl.program_id(0) * (BLOCK // 8) + tl.arange(0, BLOCK // 8)
    v = tl.zeros(place.shape, D)
    if v_first is not None:
        v = tl.load(v_first + place, mask=inside, other=0)
    for _ in range(T):
        m = v + tl.load(x + place, mask=inside, other=0).to(D)
        half = tl.load(scales + T)
        above = m > half
        below = m < -half
        spike = above.to(D) - below.to(D)
        tl.store(spikes + place, spike.to(spikes.dtype.element_ty), mask=inside)
        if places is not None:
            # Neurons outside would set bits of the last byte.
            tl.store(places + byte, packed_bits(above & inside, BLOCK), mask=byte < row)
            tl.store(places + T * row + byte, packed_bits(below & inside, BLOCK), mask=byte < row)
            near = tl.abs(m) <= tl.load(scales)
            tl.store(within + byte, packed_bits(near & inside, BLOCK), mask=byte < row)
            places += row
            within += row
        v = m * carried(above, below, scales, T, D)
        x += size
        spikes += size
        scales += 1
    tl.store(v_last + place, v, mask=inside)


@triton.jit
def ternary_gradient_kernel(g_spikes, g_last, g_x, g_first, places, within, scales, size, row,
                            T: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """Input gradient; `g_first` gets that of the first potential."""
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = place < size
    g_potential = tl.zeros(place.shape, D)
    if g_last is not None:
        g_potential = tl.load(g_last + place, mask=inside, other=0)
    # From the last time step on.
    last = tl.full((), T - 1, tl.int64)
    g_spikes += last * size
    g_x += last * size
    places += last * row
    within += last * row
    scales += T - 1
    for _ in range(T):
        above = bits_at(places, place, inside)
        below = bits_at(places + T * row, place, inside)
        near = bits_at(within, place, inside)
        g = tl.load(g_spikes + place, mask=inside, other=0).to(D) * tl.load(scales + 3 * T)
        g_potential = tl.where(near, g, 0.0) + g_potential * carried(above, below, scales, T, D)
        tl.store(g_x + place, g_potential.to(g_x.dtype.element_ty), mask=inside)
        g_spikes -= size
        g_x -= size
        places -= row
        within -= row
        scales -= 1
    tl.store(g_first + place, g_potential, mask=inside)


class TritonBiSpike(CompiledBiSpike):
    def __init__(self, shape: torch.Size, dtype: torch.dtype, spec: NeuronSpec) -> None:
        super().__init__(shape, dtype, spec)
        steps = shape[0]
        size = shape[1:].numel()
        self._row = -(-size // 8)
        block = THREADS * lanes_of_type(dtype)
        common = {"T": steps, "D": TRITON_TYPES[compute_type(dtype)], "BLOCK": block}
        self._fire = Launch(fire_ternary_kernel, -(-size // block), size, self._row, **common)
        self._gradient = Launch(ternary_gradient_kernel, -(-size // block), size, self._row, **common)

    def fire(
        self, x: Tensor, v0: Tensor | None, amplitude: Tensor, packed: bool
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        steps, size = x.shape
        spikes = torch.empty_like(x)
        last = amplitude.new_empty(size)
        row = self._row if packed else 0
        places = x.new_empty((2, steps, row), dtype=torch.uint8)
        inside = x.new_empty((steps, row), dtype=torch.uint8)
        outputs = (places, inside) if packed else (None, None)
        self._fire(x, v0, last, spikes, *outputs, scales_of(amplitude))
        return spikes, last, places, inside

    def backward(
        self, places: Tensor, inside: Tensor, amplitude: Tensor, g_spikes: Tensor, g_last: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        g_x = torch.empty_like(g_spikes)
        g_first = amplitude.new_empty(g_spikes.shape[1])
        self._gradient(g_spikes, g_last, g_x, g_first, places, inside, scales_of(amplitude))
        return g_x, g_first
