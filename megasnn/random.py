"""Keyed randomness: every random number follows from what it is for, never from which rank draws it.

A key is a tuple such as ``("init", "blocks.0.mlp.fc1.conv.weight")`` or ``("augment", epoch, sample)``. Equal keys give
equal numbers on every rank, layout and number of workers; different keys give independent streams.

There are two kinds of streams:

- What is drawn in training (dropout, drop path, augmentation, mixing) comes from Philox4x32-10, a function of a key and
  a counter: value i of a stream is word i mod 4 of counter i // 4. So whoever needs some of the values computes just
  those, and plain integer arithmetic gives the same bits on every device. `megasnn.kernels.philox` draws for tensors.
- Initial values come from torch's CPU generator (`keyed_generator`), the order of samples from NumPy's raw words, as
  they did before there was the generator above. Their bits are older than it and stay.
"""

from __future__ import annotations

import hashlib
import math
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    import torch

WORD = 0xFFFFFFFF
UNIFORM_BITS = 24  # as many as float32 holds exactly


def keyed_seed(*key: int | str) -> int:
    """A seed in [0, 2^63) from a key of integers and strings: the first 8 bytes of BLAKE2b over their representation.

    Raises:
        TypeError: a part of the key is neither an integer nor a string (floats and objects have no stable text).
    """
    for part in key:
        if not isinstance(part, (int, str)):
            raise TypeError(f"a random key is made of integers and strings, got {part!r} ({type(part).__name__})")
    text = "\x1f".join(f"{type(part).__name__}:{part}" for part in key)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


def keyed_generator(*key: int | str) -> torch.Generator:
    """A CPU generator for one key. The CPU's stream is used on every device, so that values do not depend on it."""
    import torch

    return torch.Generator().manual_seed(keyed_seed(*key))


def philox_key(*key: int | str) -> tuple[int, int]:
    """The two 32-bit words that Philox takes as its key: the low and the high half of `keyed_seed`."""
    seed = keyed_seed(*key)
    return seed & WORD, seed >> 32


def philox(c0: Any, c1: Any, c2: Any, c3: Any, k0: Any, k1: Any) -> tuple[Any, Any, Any, Any]:
    """Philox4x32-10: the four random words of a counter of four words under a key of two.

    Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3". Words are integers in [0, 2^32): Python's, those
    of int64 arrays and tensors, and those of compiled loops alike. A product that overflows 64 bits keeps the low ones,
    and its upper half is masked after the shift, so that the sign does not matter.
    """
    for _ in range(10):
        first, second = 0xD2511F53 * c0, 0xCD9E8D57 * c2
        c0, c1 = (second >> 32 & WORD) ^ c1 ^ k0, second & WORD
        c2, c3 = (first >> 32 & WORD) ^ c3 ^ k1, first & WORD
        k0, k1 = k0 + 0x9E3779B9 & WORD, k1 + 0xBB67AE85 & WORD
    return c0, c1, c2, c3


class Draws:
    """The values of one key's stream, one after the other, for decisions that are taken on the host.

    Numbers in [0, 1) are the upper 24 bits of a word.
    """

    def __init__(self, *key: int | str) -> None:
        self._key, self._next = philox_key(*key), 0
        self._block: tuple[int, tuple[int, int, int, int]] | None = None  # a counter and its four words

    def words(self, count: int) -> NDArray[np.int64]:
        """The next `count` words, in [0, 2^32)."""
        first, self._next = self._next, self._next + count
        counters = np.arange(first // 4, (self._next + 3) // 4)
        drawn = np.stack(philox(counters & WORD, counters >> 32, 0, 0, *self._key), axis=1)
        return drawn.reshape(-1)[first % 4 :][:count]

    def word(self) -> int:
        """The next word."""
        counter, place = divmod(self._next, 4)
        self._next += 1
        if self._block is None or self._block[0] != counter:
            self._block = counter, philox(counter & WORD, counter >> 32, 0, 0, *self._key)
        return self._block[1][place]

    def unit(self) -> float:
        """A number in [0, 1)."""
        return (self.word() >> 32 - UNIFORM_BITS) * 2.0**-UNIFORM_BITS

    def between(self, low: float, high: float) -> float:
        """A number in [low, high)."""
        return low + (high - low) * self.unit()

    def below(self, count: int) -> int:
        """One of 0, 1, ..., count - 1."""
        return self.word() * count >> 32

    def coin(self) -> bool:
        """Heads, half of the time."""
        return bool(self.word() & 1)

    def order(self, count: int) -> list[int]:
        """0, 1, ..., count - 1 in random order."""
        return np.argsort(self.words(count), kind="stable").tolist()

    def normals(self, count: int) -> NDArray[np.float64]:
        """Numbers of mean 0 and variance 1, two from each two words (Box and Muller)."""
        units = (self.words(count + count % 2) >> 32 - UNIFORM_BITS).reshape(-1, 2) * 2.0**-UNIFORM_BITS
        radius, angle = np.sqrt(-2 * np.log1p(-units[:, 0])), 2 * np.pi * units[:, 1]
        return np.stack([radius * np.cos(angle), radius * np.sin(angle)], axis=1).reshape(-1)[:count]

    def beta(self, alpha: float) -> float:
        """A number in [0, 1] of the symmetric beta distribution."""
        first, second = self._log_gamma(alpha), self._log_gamma(alpha)
        return 1 / (1 + math.exp(min(second - first, 700.0)))

    def _log_gamma(self, shape: float) -> float:
        """The logarithm of a number of the gamma distribution (Marsaglia and Tsang 2000)."""
        d = shape + 1 - 1 / 3  # one more than asked for: below 1 the method does not hold
        while True:
            normal = float(self.normals(1)[0])
            v = (1 + normal / math.sqrt(9 * d)) ** 3
            if v > 0 and math.log1p(-self.unit()) < normal**2 / 2 + d - d * v + d * math.log(v):
                return math.log(d * v) + math.log1p(-self.unit()) / shape
