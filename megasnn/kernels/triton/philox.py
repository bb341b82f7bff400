"""The Triton kernel of `megasnn.kernels.philox`, with equal bits."""

from __future__ import annotations

from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.random import philox_impl

from megasnn.kernels.triton.launch import Launch

_COUNTERS = 512  # of a program; each counter gives four values


@triton.jit
def keep_kernel(kept, k0, k1, samples, runs, stride, offset, length, threshold, blocks, COUNTERS: tl.constexpr):
    """Sets `kept [steps, samples, runs, length]` where a value's upper 24 bits are at least `threshold`.

    A run begins at value `(step runs + run) stride + offset` in its sample's stream.
    """
    # A program has a block of counters of one run of one sample.
    row = tl.program_id(0).to(tl.int64) // blocks
    block = tl.program_id(0) % blocks
    run = row % runs
    sample = row // runs % samples
    step = row // runs // samples
    start = (step * runs + run) * stride + offset
    counter = start // 4 + block * COUNTERS + tl.arange(0, COUNTERS)
    low = (counter & 0xFFFFFFFF).to(tl.uint32)
    high = (counter >> 32).to(tl.uint32)
    zero = tl.zeros(low.shape, tl.uint32)
    key0 = tl.load(k0 + sample).to(tl.uint32)
    key1 = tl.load(k1 + sample).to(tl.uint32)
    w0, w1, w2, w3 = philox_impl(low, high, zero, zero, key0, key1)
    # Interleaving twice puts the four words of a counter side by side, in the order of the stream.
    words = tl.interleave(tl.interleave(w0, w2), tl.interleave(w1, w3))
    place = block * (COUNTERS * 4) + tl.arange(0, COUNTERS * 4) - start % 4
    at_least = (words >> 8).to(tl.int32) >= threshold
    tl.store(kept + row * length + place, at_least.to(tl.int8), mask=(place >= 0) & (place < length))


def kept_by_kernel(
    threshold: int, keys: Tensor, steps: int, runs: int, stride: int, offset: int, length: int
) -> Tensor:
    """`megasnn.kernels.philox.kept_by_tensors` with a `Runs`' numbers: bool `[steps, N, runs, length]`."""
    samples = keys.shape[1]
    kept = torch.empty(steps, samples, runs, length, dtype=torch.bool, device=keys.device)
    if kept.numel():
        blocks = -(-(length + 3) // (4 * _COUNTERS))
        launch = _keep_launch(steps * samples * runs * blocks, samples, runs, stride, offset, length, threshold, blocks)
        launch(kept.view(torch.uint8), *keys)
    return kept


@lru_cache(maxsize=1024)
def _keep_launch(programs: int, *numbers: int) -> Launch:
    return Launch(keep_kernel, programs, *numbers, COUNTERS=_COUNTERS)
