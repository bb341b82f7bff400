"""Random choices keyed by a value's place in the whole tensor: equal bits on every device.

A compiled loop draws on the CPU, a Triton kernel on a GPU; both must equal integer arithmetic on tensors.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from megasnn.common.random import UNIFORM_BITS, WORD_MASK, philox
from megasnn.kernels.triton.available import usable_on


def kept(
    p: float,
    keys: Tensor,
    steps: int,
    pixels: int,
    channels: range,
    all_channels: int,
    first_step: int = 0,
) -> Tensor:
    """Mask of the values that dropout with probability p keeps: bool `[steps, N, pixels, channels]`.

    Each sample's values `[steps, pixels, all_channels]` are numbered in this order. A value's number is its place in
    its key's stream. The value is kept where the draw there, in [0, 1), is at least p.

    Args:
        keys: int64 `[2, N]`, contiguous, from `megasnn.common.random.philox_key`. The mask is on their device.
        channels: this rank's among `all_channels`.
        first_step: the first time step's number.
    """
    # All channels of all pixels are one run of values; some channels are a run for each pixel.
    runs = 1 if len(channels) == all_channels else pixels
    begin = first_step * pixels * all_channels + channels.start
    cut = Runs(runs, pixels * all_channels // runs, begin, pixels * len(channels) // runs)
    # A draw is a multiple of 2^-24: comparing its integer with the rounded-up p decides the same.
    threshold = math.ceil(p * 2**UNIFORM_BITS)
    device = keys.device
    if usable_on(device):
        from megasnn.kernels.triton.philox import kept_by_kernel

        rows = kept_by_kernel(threshold, keys, steps, *cut)
    elif device.type == "cpu":
        rows = _kept_by_loops(threshold, keys, steps, cut)
    else:
        rows = kept_by_tensors(threshold, keys, steps, cut)
    return rows.view(steps, keys.shape[1], pixels, len(channels))


class Runs(NamedTuple):
    """Neighbouring values in each time step: run r begins at r * stride + offset."""

    runs: int
    stride: int
    offset: int
    length: int


def _kept_by_loops(threshold: int, keys: Tensor, steps: int, cut: Runs) -> Tensor:
    from megasnn.kernels.numba.jit import run_kernel
    from megasnn.kernels.numba.philox import keep

    rows = torch.empty(steps * keys.shape[1], cut.runs, cut.length, dtype=torch.bool)
    if rows.numel():
        run_kernel(keep, len(rows), rows.numpy(), keys.t().contiguous().numpy(), cut.stride, cut.offset, threshold)
    return rows


def kept_by_tensors(threshold: int, keys: Tensor, steps: int, cut: Runs) -> Tensor:
    """The mask by tensor operations alone, bool `[steps, N, runs, length]`.

    Args:
        threshold: a value is kept where its upper 24 bits are at least this.
    """
    device = keys.device
    starts = torch.arange(steps * cut.runs, device=device).view(steps, 1, cut.runs, 1) * cut.stride + cut.offset
    # A run may begin behind 1 to 3 of a counter's four values, and may then need one counter more.
    counters = starts // 4 + torch.arange((cut.length + 6) // 4, device=device)
    k0, k1 = keys.view(2, -1, 1, 1)
    words = torch.stack(philox(counters & WORD_MASK, counters >> 32, 0, 0, k0, k1), dim=-1)
    places = starts % 4 + torch.arange(cut.length, device=device)
    drawn = words.flatten(-2).gather(-1, places.expand(-1, keys.shape[1], -1, -1))
    return (drawn >> (32 - UNIFORM_BITS)) >= threshold
