"""Clocks of event cameras: counters of a few bits, which wrap to 0."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def unwrap(counter: NDArray, bits: int, silence: int | None = None) -> NDArray[np.int64]:
    """Removes the wraps of a counter with `bits` bits.

    A fall by more than the range less `silence` is a wrap. Smaller falls stay.

    Args:
        silence: longest time across a wrap; by default half the range.
    """
    values = counter.astype(np.int64)
    half = 1 << (bits - 1)
    threshold = half if silence is None else (1 << bits) - silence
    steps = np.diff(values)
    wraps = (steps < -threshold).astype(np.int64)
    # Back before the wrap, to a late event.
    wraps -= steps > threshold
    turns = np.cumsum(wraps)
    # A large rise before the first wrap is none: it follows a zero at the beginning.
    turns -= np.minimum(np.minimum.accumulate(turns), 0)
    values[1:] += turns << bits
    return values
