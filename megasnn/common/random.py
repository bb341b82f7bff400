"""Keyed randomness: every random number follows from what it is for, never from which rank draws it.

A key is a tuple such as ``("init", "blocks.0.mlp.fc1.conv.weight")`` or ``("augment", epoch, sample)``. Equal keys give
equal numbers on every rank, layout and number of workers; different keys give independent streams.

Dropout and drop path draw from Philox4x32-10, a function of a key and a counter: value i of a stream is word i mod 4 of
counter i // 4. So whoever needs some of the values computes just those, and plain integer arithmetic gives the same
bits on every device; see `megasnn.kernels.philox`. Initial values come from torch's CPU generator, augmentation and
mixing from NumPy's, the order of samples from NumPy's raw words.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import torch

WORD_MASK = 0xFFFFFFFF
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


def keyed_numbers(*key: int | str) -> np.random.Generator:
    """NumPy's generator for one key, for decisions that are taken on the host."""
    return np.random.Generator(np.random.Philox(key=keyed_seed(*key)))


def philox_key(*key: int | str) -> tuple[int, int]:
    """The two 32-bit words that Philox takes as its key: the low and the high half of `keyed_seed`."""
    seed = keyed_seed(*key)
    return seed & WORD_MASK, seed >> 32


def philox(c0: Any, c1: Any, c2: Any, c3: Any, k0: Any, k1: Any) -> tuple[Any, Any, Any, Any]:
    """Philox4x32-10: the four random words of a counter of four words under a key of two.

    Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3". Words are integers in [0, 2^32): Python's, those
    of int64 arrays and tensors, and those of compiled loops alike. A product that overflows 64 bits keeps the low ones,
    and its upper half is masked after the shift, so that the sign does not matter.
    """
    for _ in range(10):
        first, second = 0xD2511F53 * c0, 0xCD9E8D57 * c2
        c0, c1 = (second >> 32 & WORD_MASK) ^ c1 ^ k0, second & WORD_MASK
        c2, c3 = (first >> 32 & WORD_MASK) ^ c3 ^ k1, first & WORD_MASK
        k0, k1 = k0 + 0x9E3779B9 & WORD_MASK, k1 + 0xBB67AE85 & WORD_MASK
    return c0, c1, c2, c3
