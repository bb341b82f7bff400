"""Keyed randomness: a random number depends on its purpose only, never on the rank that draws it.

A key is a tuple such as ``("augment", epoch, sample)``; different keys give independent streams. Dropout and drop path
use Philox4x32-10 (`megasnn.kernels.philox`), initial values torch's CPU generator, augmentation and mixing NumPy's, the
order of samples NumPy's raw words.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import torch

WORD_MASK = 0xFFFFFFFF
UNIFORM_BITS = 24  # float32 holds that many exactly


def keyed_seed(*key: int | str) -> int:
    """First 8 bytes of BLAKE2b over the key's text, in [0, 2^63).

    Raises TypeError unless the key consists of integers and strings.
    """
    for part in key:
        # Floats and objects have no stable text.
        if not isinstance(part, (int, str)):
            raise TypeError(f"a random key is made of integers and strings, got {part!r} ({type(part).__name__})")
    text = "\x1f".join(f"{type(part).__name__}:{part}" for part in key)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


def keyed_generator(*key: int | str) -> torch.Generator:
    import torch

    # All devices use the CPU's stream, so their values are equal.
    return torch.Generator().manual_seed(keyed_seed(*key))


def keyed_numbers(*key: int | str) -> np.random.Generator:
    """For decisions on the host."""
    return np.random.Generator(np.random.Philox(key=keyed_seed(*key)))


@contextmanager
def seeded_globals(*key: int | str) -> Iterator[None]:
    """Seeds the global CPU generators of torch, NumPy and Python for a block of other people's code."""
    import torch

    seed = keyed_seed(*key)
    of_python = random.getstate()
    of_numpy = np.random.get_state()
    # The training process draws from the same generators: outside of the block they go on as if nothing was drawn.
    with torch.random.fork_rng(devices=[]):
        # torch.manual_seed would seed the GPU's generator, too.
        torch.default_generator.manual_seed(seed)
        np.random.seed(seed & WORD_MASK)
        random.seed(seed)
        try:
            yield
        finally:
            random.setstate(of_python)
            np.random.set_state(of_numpy)


def philox_key(*key: int | str) -> tuple[int, int]:
    """Low and high 32-bit word of `keyed_seed`."""
    seed = keyed_seed(*key)
    return seed & WORD_MASK, seed >> 32


def philox(c0: Any, c1: Any, c2: Any, c3: Any, k0: Any, k1: Any) -> tuple[Any, Any, Any, Any]:
    """Philox4x32-10 (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3").

    Four random words from a counter of four and a key of two: integers in [0, 2^32), int64 arrays or
    tensors, also in compiled loops.
    """
    # Counters let a rank compute only the values it needs, with the same bits on every device: value i of a stream is
    # word i mod 4 of counter i // 4.
    for _ in range(10):
        # The product may overflow int64. Its low 64 bits are right, and the mask after the shift drops the sign.
        first = 0xD2511F53 * c0
        second = 0xCD9E8D57 * c2
        c0, c1 = (second >> 32 & WORD_MASK) ^ c1 ^ k0, second & WORD_MASK
        c2, c3 = (first >> 32 & WORD_MASK) ^ c3 ^ k1, first & WORD_MASK
        k0, k1 = k0 + 0x9E3779B9 & WORD_MASK, k1 + 0xBB67AE85 & WORD_MASK
    return c0, c1, c2, c3
