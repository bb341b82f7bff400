"""Spikes that left a kernel as bits as well: whoever is given the tensor need not pack it again."""

from __future__ import annotations

from torch import Tensor


def remember_bits(spikes: Tensor, bits: Tensor | None) -> Tensor:
    """The spikes, which go on knowing what `codec.pack_bits` makes of them, until they change."""
    if bits is not None:
        spikes._bits = bits, spikes._version  # type: ignore[attr-defined]
    return spikes


def bits_of(x: Tensor) -> Tensor | None:
    """What `codec.pack_bits` makes of spikes that a kernel has packed; None of all other tensors."""
    bits, version = getattr(x, "_bits", (None, 0))
    return bits if bits is not None and x._version == version else None
