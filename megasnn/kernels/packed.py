"""Spikes that left a kernel as bits as well: whoever is given the tensor need not pack it again."""

from __future__ import annotations

import torch
from torch import Tensor


def wants_bits(x: Tensor) -> bool:
    """Whether what fires on an input `[T, N, C, ...]` is to give its spikes as bits as well: they cost next to nothing
    while the spikes are at hand, a backward needs them, and layers take them of tensors with their channels last."""
    return torch.is_grad_enabled() and x.ndim > 2 and x[0].movedim(1, -1).is_contiguous()


def remember_bits(spikes: Tensor, bits: Tensor | None) -> Tensor:
    """The spikes, which go on knowing what `codec.pack_bits` makes of them, until torch changes them in place.

    Those of `torch.inference_mode` never know: torch does not count their changes.
    """
    if bits is not None and not spikes.is_inference():
        spikes._bits = bits, spikes._version  # type: ignore[attr-defined]
    return spikes


def bits_of(x: Tensor) -> Tensor | None:
    """What `codec.pack_bits` makes of spikes that a kernel has packed; None of all other tensors."""
    bits, version = getattr(x, "_bits", (None, 0))
    if bits is None or x.is_inference():  # a copy that is made in `torch.inference_mode` has what was remembered
        return None
    return bits if x._version == version else None
