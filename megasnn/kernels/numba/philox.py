"""Compiled loops for `megasnn.kernels.philox`: they draw about 3 values in a nanosecond."""

from __future__ import annotations

from typing import Any

from numba import njit

from megasnn.common.random import WORD_MASK, philox
from megasnn.kernels.numba.jit import kernel, part

# Inlined before LLVM sees it: only then are several counters computed at once. numba does not watch the file of this
# function for changes, but its numbers are fixed by its paper.
_philox: Any = njit(inline="always")(philox)


@kernel
def keep(kept, keys, stride, offset, threshold, first, last):
    """Sets `kept [slices, runs, length]` where a value's upper 24 bits are at least ``threshold``.

    ``keys [N, 2]``: slice s belongs to stream ``s % N``. Its run r begins at value
    ``((s // N) * runs + r) * stride + offset``.
    """
    runs = kept.shape[1]
    samples = keys.shape[0]
    for index in range(first, last):
        step = index // samples
        sample = index % samples
        for run in range(runs):
            start = (step * runs + run) * stride + offset
            _keep_run(kept[index, run], start, keys[sample, 0], keys[sample, 1], threshold)


@part
def _keep_run(kept, start, k0, k1, threshold):
    """Whole counters in the middle, with all four words in use."""
    head = min(-start % 4, kept.size)
    counters = (kept.size - head) // 4
    _keep_few(kept[:head], start, k0, k1, threshold)
    middle = kept[head : head + 4 * counters]
    base = (start + head) // 4
    for i in range(counters):
        w0, w1, w2, w3 = _philox((base + i) & WORD_MASK, (base + i) >> 32, 0, 0, k0, k1)
        middle[4 * i] = (w0 >> 8) >= threshold
        middle[4 * i + 1] = (w1 >> 8) >= threshold
        middle[4 * i + 2] = (w2 >> 8) >= threshold
        middle[4 * i + 3] = (w3 >> 8) >= threshold
    done = head + 4 * counters
    _keep_few(kept[done:], start + done, k0, k1, threshold)


@part
def _keep_few(kept, start, k0, k1, threshold):
    for i in range(kept.size):
        counter = (start + i) // 4
        words = _philox(counter & WORD_MASK, counter >> 32, 0, 0, k0, k1)
        kept[i] = (words[(start + i) % 4] >> 8) >= threshold
