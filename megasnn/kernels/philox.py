"""Random choices for tensors, each by the place of a value in the whole tensor, with equal bits on every device.

On the CPU a compiled loop draws them, on a GPU a Triton kernel; both must equal integer arithmetic on tensors.
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
    """Mask of values that dropout with probability p keeps: bool `[steps, N, pixels, channels]`, where the keys are.

    Each sample's values `[steps, pixels, all_channels]` are numbered in this order, and the number is the place in the
    stream of its key; a value is kept where the number in [0, 1) drawn there is at least p.

    Args:
        keys: N keys of `megasnn.common.random.philox_key`, one behind the other: int64 `[2, N]`, contiguous.
        channels: those wanted of `all_channels`.
        first_step: the number of the first of the steps.
    """
    # All channels of all pixels are one run of values; some of them are a run for each pixel.
    runs = 1 if len(channels) == all_channels else pixels
    begin = first_step * pixels * all_channels + channels.start
    cut = Runs(runs, pixels * all_channels // runs, begin, pixels * len(channels) // runs)
    threshold = math.ceil(p * 2**UNIFORM_BITS)
    samples, device = keys.shape[1], keys.device
    if usable_on(device):
        from megasnn.kernels.triton.philox import kept_by_kernel

        rows = kept_by_kernel(threshold, keys, steps, *cut)
    elif device.type == "cpu":
        rows = _kept_by_loops(threshold, keys, steps, cut)
    else:
        rows = kept_by_tensors(threshold, keys, steps, cut)
    return rows.view(steps, samples, pixels, len(channels))


class Runs(NamedTuple):
    """A part of each time step's values that consists of runs of neighbours: run r begins at r * stride + offset."""

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
    """Mask as the compiled loops give it, by tensor operations alone: bool `[steps, N, runs, length]`.

    Args:
        threshold: the least upper 24 bits that are kept.
    """
    device = keys.device
    starts = torch.arange(steps * cut.runs, device=device).view(steps, 1, cut.runs, 1) * cut.stride + cut.offset
    counters = starts // 4 + torch.arange((cut.length + 6) // 4, device=device)
    k0, k1 = keys.view(2, -1, 1, 1)
    words = torch.stack(philox(counters & WORD_MASK, counters >> 32, 0, 0, k0, k1), dim=-1)
    places = starts % 4 + torch.arange(cut.length, device=device)
    drawn = words.flatten(-2).gather(-1, places.expand(-1, keys.shape[1], -1, -1))
    return (drawn >> 32 - UNIFORM_BITS) >= threshold
