"""Spikes that know their bits, until they change; those of `torch.inference_mode` never know them."""

from __future__ import annotations

import copy

import torch
from torch import Tensor

from megasnn.kernels.codec import pack_bits
from megasnn.kernels.packed import bits_of, remember_bits


def spikes() -> Tensor:
    return (torch.rand(2, 3, 16, 4, 4) < 0.2).float()


def test_a_change_in_inference_mode_is_seen() -> None:
    x = spikes()
    packed = pack_bits(x)
    assert bits_of(remember_bits(x, packed)) is packed
    with torch.inference_mode():
        assert bits_of(x) is packed
        x.neg_()
        assert bits_of(x) is None


def test_tensors_of_inference_mode_never_know() -> None:
    outside = spikes()
    remember_bits(outside, pack_bits(outside))
    with torch.inference_mode():
        inside, copied = spikes(), copy.deepcopy(outside)
        assert remember_bits(inside, pack_bits(inside)) is inside
        assert copied.is_inference() and bits_of(inside) is None and bits_of(copied) is None
    assert bits_of(inside) is None and bits_of(copied) is None
