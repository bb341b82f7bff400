"""What a tensor is known to hold decides how it travels and how it is stashed: spikes as bits, counts as bytes.

A spike is 0 or 1 and takes one bit. Spikformer's residual stream is a sum of spikes: a small count, one byte. Both
are exact. Everything else (images, averages, gradients) is dense. A value that does not fit raises; nothing is cut.
"""

from __future__ import annotations

from enum import Enum

import torch
from torch import Tensor

from megasnn.device_checks import explained
from megasnn.kernels import codec


class Content(Enum):
    """What a tensor holds: anything, zeros and ones, or whole numbers from 0 to 255."""

    DENSE = "dense"
    SPIKES = "spikes"
    COUNTS = "counts"


DENSE, SPIKES, COUNTS = Content


def may_be_sparse(content: Content, pool: int = 1) -> bool:
    """True where a layer may sum over spikes: its input holds spikes or counts, or averages of 2, 4, ... pixels square.

    The bound of 11 bits is that of values that are exact in TF32.
    """
    largest = {Content.DENSE: None, Content.SPIKES: 1, Content.COUNTS: 255}[content]
    return largest is not None and pool & (pool - 1) == 0 and largest * pool**2 <= 2**11


def encode(flat: Tensor, content: Content, check: bool = False) -> Tensor:
    """Packs a contiguous 1-d tensor: uint8 for SPIKES ([ceil(n/8)]) and COUNTS ([n]), itself for DENSE. Of a
    tensor without values (on the meta device), the shape of that.

    Raises:
        ValueError: with `check`, a value that the format cannot hold exactly; inside of a step it is noted
            (megasnn/device_checks.py).
    """
    if flat.is_meta:
        return encoded_like(flat.numel(), content, flat.dtype, flat.device)
    if content is Content.DENSE:
        return flat
    pack = codec.pack_bits if content is Content.SPIKES else codec.pack_counts
    if not check:
        return pack(flat)
    with explained(
        lambda text: (
            f"{text}; what the layers before gave was said to hold {content.value}: a neuron of one's own "
            "that gives other values says so, SpikingNeuron(..., largest=...), a layer by holds="
        )
    ):
        return pack(flat, check)


def encoded_like(
    count: int, content: Content, dtype: torch.dtype, device: torch.device, pinned: bool = False
) -> Tensor:
    """An empty buffer for `count` encoded values; in pinned memory where a GPU will read it from the host's."""
    if content is Content.SPIKES:
        count, dtype = (count + 7) // 8, torch.uint8
    elif content is Content.COUNTS:
        dtype = torch.uint8
    return torch.empty(count, dtype=dtype, device=device, pin_memory=pinned)


def decode_into(payload: Tensor, content: Content, rows: Tensor) -> None:
    """Unpacks into a 2-d tensor of unit column stride: a dense [R, C], or some columns of a wider one."""
    if content is Content.SPIKES:
        codec.unpack_bits_into(payload, rows)
    else:
        rows.copy_(payload.view(rows.shape))
