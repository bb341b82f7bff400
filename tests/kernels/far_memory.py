"""Offsets of more than 31 bits: time steps far apart in an address space of which only a few pages are used."""

from __future__ import annotations

import mmap

import numpy as np
import torch
from torch import Tensor

from megasnn.kernels import NeuronSpec
from megasnn.kernels.neuron_spec import numbers

FAR = 3 * 2**29  # values of a time step: the third one begins beyond 2^31
BLOCK, CHANNELS = 256, 16
MAP_NORESERVE = 0x4000  # on Linux; mmap has the name from Python 3.13 on


class Far:
    """Room for float32, of which memory is taken only where something is written.

    Attributes:
        start: the first value alone, which tells a kernel where the others are: the interpreter copies what it gets.
    """

    def __init__(self, length: int) -> None:
        before = 2**31  # for offsets that have become negative: a wrong result, and no crash
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE
        self._values = np.frombuffer(mmap.mmap(-1, 4 * (before + length), flags), np.float32)[before:]
        self.start = torch.from_numpy(self._values[:1])

    def write(self, place: int, values: Tensor) -> None:
        self._values[place : place + len(values)] = values

    def read(self, place: int, count: int) -> Tensor:
        return torch.from_numpy(self._values[place : place + count].copy())


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def far(steps: Tensor, size: int) -> Far:
    """Time steps of which each has `size` values, the first ones of them given."""
    room = Far(len(steps) * size)
    for t, values in enumerate(steps):
        room.write(t * size, values)
    return room


def near(room: Far, steps: int, size: int) -> Tensor:
    return torch.stack([room.read(t * size, BLOCK) for t in range(steps)])


def far_kernels(size: int, steps: int, seed: int, chunk: int) -> list[Tensor]:
    """What the kernels of a forward and a backward give for steps of so many values, of which the first are used."""
    from megasnn.kernels.triton.fire import fire_kernel, gradient_kernel
    from megasnn.kernels.triton.launch import COLUMNS, TRITON_TYPES, Launch, at_once
    from megasnn.kernels.triton.sums import backward_sums_kernel

    norm = normal(5, CHANNELS, seed=seed)
    x, g = (far(2 * normal(steps, BLOCK, seed=seed + each), size) for each in (1, 2))
    spikes, g_x, kept, partial = Far(steps * size), Far(steps * size), Far(steps * size), torch.zeros(2, 1, COLUMNS)
    starts = kept.start if steps > chunk else None
    common = {"T": steps, "REPEATED": False, "N": numbers(NeuronSpec()), "D": TRITON_TYPES[torch.float32]}
    fire = Launch(
        fire_kernel, 1, size, size, CHANNELS, 0, 0, 0, POOL=False, AT_ONCE=at_once(steps), BLOCK=BLOCK, **common
    )
    fire(x.start, norm[:3], None, None, spikes.start, None, None)
    gradient = Launch(gradient_kernel, 1, size, CHANNELS, CHUNK=chunk, BLOCK=BLOCK, **common)
    gradient(x.start, g.start, g_x.start, norm[:3], norm[3:], None, None, None, None, None, starts)
    sums = Launch(
        backward_sums_kernel, 1, size, size, CHANNELS, 0, 0, 0, COLUMNS, 1, 1,
        CHUNK=chunk, POOL=False, LEARN=False, ROWS=BLOCK // COLUMNS, COLUMNS=COLUMNS, **common,
    )  # fmt: skip
    sums(x.start, g.start, norm[:3], None, None, None, partial, starts)
    return [near(spikes, steps, size), near(g_x, steps, size), partial]
