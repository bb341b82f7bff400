"""Time of sums over spikes in units of the dense product's: a rule, so that runs with as many threads decide
alike.

Fitted by hand to times of one core, an AMD EPYC (Zen 4) and an Intel Xeon (Emerald Rapids), of layers of 16 to 1,536
channels, 1 x 1 and 3 x 3, on 64 to 32,768 pixels.
"""

from __future__ import annotations

from dataclasses import dataclass

LIMIT = 1.0
"""Up to which sums are formed."""

_ADDING = 2.5  # a term, where rows are long; shorter ones leave registers idle
_LONG = 512  # bytes of a row
_LISTING = 150.0  # a spike, against a multiplication and addition of the dense product
_PACKING = 45.0  # a value of the input
_STARTING = 750.0  # the terms of a pixel at a place of the kernel
_TURNING = 100.0  # a value of the weight
_CALLING = 45e6  # the loops
_SHARING = 0.13  # what each thread of a weight gradient does that the others do, too


@dataclass(frozen=True)
class Work:
    """A product, as what decides how long it takes.

    Attributes:
        pixels: of all frames of the output.
        channels, columns: of the input and of the output.
        places: of the kernel.
        itemsize: bytes of a value.
    """

    pixels: int
    channels: int
    columns: int
    places: int
    itemsize: int

    def is_worth(self, share: float, threads: int = 1) -> bool:
        """True where sums take no longer than the dense product.

        Args:
            share: of the input's values that are not 0.
            threads: that share out a weight gradient; an output's is the same with any number.
        """
        of_pixel = self.columns * self.places
        adding = _ADDING * max(1.0, _LONG / (self.columns * self.itemsize))
        per_value = share * (adding + _LISTING / of_pixel) + _PACKING / of_pixel
        once = _TURNING / self.pixels + _CALLING / (2 * self.pixels * self.channels * of_pixel)
        time = per_value + once + _STARTING / (self.channels * self.columns) + _SHARING * (threads - 1)
        return time <= LIMIT
