"""Clocks of event cameras: counters of some bits that begin anew at 0 when they are full."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def unwrap(counter: NDArray, bits: int) -> NDArray[np.int64]:
    """Values of a counter of `bits` bits without its wraps.

    The counter has wrapped where it falls by more than half its range. Where it then rises by more than half, it is
    back before the wrap, as with an event that comes late. Smaller steps back stay as they are.
    """
    values = counter.astype(np.int64)
    half = 1 << (bits - 1)
    steps = np.diff(values)
    wraps = (steps < -half).astype(np.int64)
    wraps -= steps > half
    turns = np.cumsum(wraps)
    # Before the first wrap there is nothing to go back to: a large rise is one, as after a zero at the beginning.
    turns -= np.minimum(np.minimum.accumulate(turns), 0)
    values[1:] += turns << bits
    return values
