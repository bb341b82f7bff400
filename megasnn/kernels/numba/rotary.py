"""Rotary positions (arXiv 2104.09864) by a compiled loop.

It takes an eighth of the time of torch's strided operations.
"""

from __future__ import annotations

from megasnn.kernels.numba.jit import kernel


@kernel
def rotate(values, result, cos, sin, first, last):
    """Rotates q and k of `[frames, tokens, 3, heads, d]` into `result`, and copies v.

    (a, b) -> (a cos - b sin, b cos + a sin) for the halves a and b of a head. `cos, sin`: `[tokens, d / 2]`. `first,
    last` is a range of frames: threads share a call.
    """
    half = cos.shape[1]
    for frame in range(first, last):
        for token in range(values.shape[1]):
            for block in range(2):
                for head in range(values.shape[3]):
                    for i in range(half):
                        a = values[frame, token, block, head, i]
                        b = values[frame, token, block, head, half + i]
                        result[frame, token, block, head, i] = a * cos[token, i] - b * sin[token, i]
                        result[frame, token, block, head, half + i] = b * cos[token, i] + a * sin[token, i]
            for head in range(values.shape[3]):
                for i in range(2 * half):
                    result[frame, token, 2, head, i] = values[frame, token, 2, head, i]
