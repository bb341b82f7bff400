"""Keyed randomness: every random number follows from what it is for, never from which rank draws it.

A key is a tuple such as ``("init", "blocks.0.mlp.fc1.conv.weight")`` or ``("augment", epoch, sample)``. Equal keys give
equal numbers on every rank, layout and number of workers; different keys give independent streams.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


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
