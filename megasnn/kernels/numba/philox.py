"""The loops behind `megasnn.kernels.philox`: compiled, they draw some 3 values in a nanosecond."""

from __future__ import annotations

from typing import Any

from numba import njit

from megasnn.common.random import WORD_MASK, philox
from megasnn.kernels.numba.jit import kernel, part

# Inlined before LLVM sees it: only then are several counters computed at once. Numba does not notice when the other
# file changes, but what it holds is fixed by its paper.
_philox: Any = njit(inline="always")(philox)


@kernel
def keep(kept, keys, stride, offset, threshold, first, last):
    """``kept [units, runs, length]``: whether the upper 24 bits of values of a stream are at least ``threshold``.

    ``keys [N, 2]``: unit u belongs to stream ``u % N``. Its run r is of the values from
    ``((u // N) * runs + r) * stride + offset`` on.
    """
    runs = kept.shape[1]
    for index in range(first, last):
        step, sample = index // keys.shape[0], index % keys.shape[0]
        for run in range(runs):
            _keep_run(
                kept[index, run], (step * runs + run) * stride + offset, keys[sample, 0], keys[sample, 1], threshold
            )


@part
def _keep_run(kept, start, k0, k1, threshold):
    """Whole counters in the middle, of which all four words are used."""
    head = min(-start % 4, kept.size)
    counters = (kept.size - head) // 4
    _keep_few(kept[:head], start, k0, k1, threshold)
    middle, base = kept[head : head + 4 * counters], (start + head) // 4
    for i in range(counters):
        w0, w1, w2, w3 = _philox(base + i & WORD_MASK, base + i >> 32, 0, 0, k0, k1)
        middle[4 * i] = w0 >> 8 >= threshold
        middle[4 * i + 1] = w1 >> 8 >= threshold
        middle[4 * i + 2] = w2 >> 8 >= threshold
        middle[4 * i + 3] = w3 >> 8 >= threshold
    done = head + 4 * counters
    _keep_few(kept[done:], start + done, k0, k1, threshold)


@part
def _keep_few(kept, start, k0, k1, threshold):
    for i in range(kept.size):
        counter = (start + i) // 4
        words = _philox(counter & WORD_MASK, counter >> 32, 0, 0, k0, k1)
        kept[i] = words[(start + i) % 4] >> 8 >= threshold
