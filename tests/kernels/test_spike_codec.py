"""Bits and bytes: what is packed comes back exactly, in the same places, or is refused; spikes that know their bits."""

from __future__ import annotations

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from megasnn.kernels import spike_codec as codec
from megasnn.kernels.layout import flat_in_memory
from megasnn.kernels.spike_codec import (
    COUNTS,
    DENSE,
    SPIKES,
    TERNARY,
    Content,
    bits_of,
    content_of_both,
    decode_into,
    encode,
    encoded_like,
    pack_bits,
    pack_counts,
    pack_ternary,
    remember_bits,
    share_bits,
    unpack_bits_into,
    unpack_ternary_into,
)

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.uint8, torch.bool, torch.int64]


@st.composite
def dense_tensors(draw, high: int):
    """Integers below ``high``, in any dtype that holds them, shape, and memory order."""
    shape = draw(st.lists(st.integers(1, 9), min_size=1, max_size=4))
    dtype = draw(st.sampled_from(DTYPES if high == 2 else DTYPES[:5] + DTYPES[6:]))
    order = draw(st.permutations(range(len(shape))))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    return torch.randint(0, high, shape, generator=generator).to(dtype).permute(order)


@pytest.fixture(params=["numpy", "plain"], autouse=True)
def by(request, monkeypatch):
    """Every test runs with numpy and with tensor operations."""
    if request.param == "plain":
        monkeypatch.setattr(codec, "_by_numpy", lambda x: False)


def unpacked(packed: Tensor, content: Content, like: Tensor) -> Tensor:
    """In the type and memory order of another tensor."""
    out = torch.empty_like(like)
    decode_into(packed, content, flat_in_memory(out).view(1, -1))
    return out


@settings(max_examples=60, deadline=None)
@given(dense_tensors(2), dense_tensors(256))
def test_round_trip(spikes, counts) -> None:
    packed = pack_bits(spikes, check=True)
    assert packed.dtype == torch.uint8 and packed.shape == ((spikes.numel() + 7) // 8,)
    assert torch.equal(unpacked(packed, SPIKES, spikes), spikes)
    packed = pack_counts(counts, check=True)
    assert packed.dtype == torch.uint8 and packed.shape == (counts.numel(),)
    assert torch.equal(unpacked(packed, COUNTS, counts), counts)


SIGNED = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int8, torch.int64]


@st.composite
def ternary_tensors(draw):
    """As `dense_tensors`, of -1, 0 and 1."""
    spikes = draw(dense_tensors(2))
    generator = torch.Generator().manual_seed(spikes.numel())
    signs = torch.randint(0, 2, spikes.shape, generator=generator) * 2 - 1
    return (spikes.to(torch.int64) * signs).to(draw(st.sampled_from(SIGNED)))


@settings(max_examples=60, deadline=None)
@given(ternary_tensors())
def test_ternary_round_trip(spikes) -> None:
    """Two halves of bits: a sixteenth of float32, where whole bytes are filled."""
    packed = pack_ternary(spikes, check=True)
    assert packed.dtype == torch.uint8 and packed.shape == (2 * ((spikes.numel() + 7) // 8),)
    assert encoded_like(spikes.numel(), TERNARY, spikes.dtype, spikes.device).shape == packed.shape
    assert torch.equal(unpacked(packed, TERNARY, spikes), spikes)
    halves = packed.view(2, -1)
    assert torch.equal(halves[0], pack_bits(spikes > 0)) and torch.equal(halves[1], pack_bits(spikes < 0))
    if spikes.numel() % 8 == 0:
        assert packed.nbytes * 16 == spikes.numel() * 4


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 9), st.lists(st.integers(1, 20), min_size=1, max_size=4), st.sampled_from(SIGNED), st.integers(0))
def test_ternary_shards_of_channels(rows, channels, dtype, seed) -> None:
    generator = torch.Generator().manual_seed(seed % 2**31)
    whole = torch.randint(-1, 2, (rows, sum(channels)), generator=generator).to(dtype)
    out = torch.full_like(whole, 1)
    for target, shard in zip(out.split(channels, dim=1), whole.split(channels, dim=1), strict=True):
        unpack_ternary_into(pack_ternary(shard.contiguous()), target)
    assert torch.equal(out, whole)


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 9), st.lists(st.integers(1, 20), min_size=1, max_size=4), st.sampled_from(DTYPES), st.integers(0))
def test_shards_of_channels(rows, channels, dtype, seed) -> None:
    """Every rank packs its channels; together they make the whole tensor."""
    generator = torch.Generator().manual_seed(seed % 2**31)
    whole = torch.randint(0, 2, (rows, sum(channels)), generator=generator).to(dtype)
    out = torch.full_like(whole, 1)
    for target, shard in zip(out.split(channels, dim=1), whole.split(channels, dim=1), strict=True):
        unpack_bits_into(pack_bits(shard.contiguous()), target)
    assert torch.equal(out, whole)


def test_bit_order_is_memory_order_from_the_lowest_bit() -> None:
    x = torch.zeros(2, 1, 3, 3)
    x[0, 0, 1, 0] = x[1, 0, 2, 2] = 1
    assert pack_bits(x).tolist() == [8, 0, 2]
    assert pack_bits(x.movedim(2, -1).contiguous().movedim(-1, 2)).tolist() == [2, 0, 2]  # channels fastest
    assert pack_bits(torch.ones(3)).tolist() == [7]
    gaps = (torch.arange(24).view(4, 6) % 5 == 0).float()[:, ::2]
    assert torch.equal(pack_bits(gaps), pack_bits(gaps.contiguous()))


def test_large_and_empty_tensors() -> None:
    x = (torch.rand(5, 50001, generator=torch.Generator().manual_seed(0)) < 0.3).float()
    packed = pack_bits(x, check=True)
    assert torch.equal(packed, codec._pack_bits_plain(x.view(-1))) and torch.equal(unpacked(packed, SPIKES, x), x)
    assert pack_bits(torch.empty(0, 3)).shape == pack_counts(torch.empty(0)).shape == (0,)
    assert pack_ternary(torch.empty(0, 3)).shape == (0,)
    assert unpacked(torch.empty(0, dtype=torch.uint8), TERNARY, torch.empty(0, 3)).shape == (0, 3)
    assert unpacked(torch.empty(0, dtype=torch.uint8), SPIKES, torch.empty(0, 3)).shape == (0, 3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("value", [0.5, 2.0, -1.0, -0.0, float("nan"), float("inf"), 1.01, 256.0, 1e30])
def test_what_does_not_fit_is_refused(value, dtype) -> None:
    for place in (0, 7, 64, 100):
        x = torch.zeros(101, dtype=dtype)
        x[place] = value
        for pack in (pack_bits, pack_counts):
            pack(x)
            if pack is pack_bits or value != 2.0:
                with pytest.raises(ValueError, match="got values from"):
                    pack(x, check=True)
        pack_ternary(x)
        if value != -1.0:
            with pytest.raises(ValueError, match="pack_ternary takes -1, 0 and 1, got values from"):
                pack_ternary(x, check=True)


def test_bytes_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="17 spikes"):
        decode_into(torch.zeros(2, dtype=torch.uint8), SPIKES, torch.zeros(1, 17))
    with pytest.raises(ValueError, match="17 ternary spikes take 6 bytes, got 3"):
        decode_into(torch.zeros(3, dtype=torch.uint8), TERNARY, torch.zeros(1, 17))


def test_unsigned_types_hold_no_negative_spikes() -> None:
    for values in (torch.tensor([0, 1, 255], dtype=torch.uint8), torch.tensor([0, 1, 2], dtype=torch.uint8)):
        with pytest.raises(ValueError, match="pack_ternary"):
            pack_ternary(values, check=True)
    assert pack_ternary(torch.tensor([True, False]), check=True).tolist() == [1, 0]


def test_a_content_that_includes_two() -> None:
    wide = {(SPIKES, COUNTS): COUNTS, (SPIKES, TERNARY): TERNARY, (TERNARY, COUNTS): DENSE}
    for one in Content:
        for other in Content:
            expected = one if one is other else wide.get((one, other), wide.get((other, one), DENSE))
            assert content_of_both(one, other) is expected
    assert {each for each in Content if each.is_bits} == {SPIKES, TERNARY}


def test_a_message_that_is_wrong_says_what_was_declared() -> None:
    with pytest.raises(ValueError, match=r"the layers before declared ternary.*mark_spikes\(..., largest, lowest\)"):
        encode(torch.tensor([2.0]), TERNARY, check=True)


def test_more_values_than_the_kernels_can_count_are_left_to_torch(monkeypatch) -> None:
    pytest.importorskip("triton")
    monkeypatch.setattr(codec, "usable_on", lambda device: True)
    assert codec._gpu_codec(torch.empty(2**30, device="meta")) is not None
    assert codec._gpu_codec(torch.empty(2**31, device="meta")) is None


def test_spikes_know_their_bits_until_they_change() -> None:
    """Those of `torch.inference_mode` never do."""
    x = (torch.rand(2, 3, 16, 4, 4) < 0.2).float()
    packed = pack_bits(x)
    assert bits_of(remember_bits(x, packed)) is packed and bits_of(x + 0) is None
    with torch.inference_mode():
        inside, copied = x + 0, copy.deepcopy(x)
        assert remember_bits(inside, packed) is inside and bits_of(inside) is None and bits_of(copied) is None
        assert bits_of(x) is packed
        x.neg_()
        assert bits_of(x) is None
    assert bits_of(inside) is None and bits_of(copied) is None


@pytest.mark.parametrize(("content", "pack"), [(SPIKES, pack_bits), (TERNARY, pack_ternary)])
def test_bits_are_of_one_content_and_go_on_with_a_copy(content: Content, pack) -> None:
    x = (torch.rand(2, 3, 16, 4) < 0.2).float()
    packed = pack(x)
    remember_bits(x, packed, content)
    others = {SPIKES, TERNARY} - {content}
    assert bits_of(x, content) is packed and not any(bits_of(x, each) is not None for each in others)
    assert bits_of(share_bits(x, x.detach()), content) is packed
    cloned = bits_of(share_bits(x, x.clone(), own_memory=True), content)
    assert torch.equal(cloned, packed) and cloned is not packed
    x.neg_()
    assert bits_of(share_bits(x, x.detach()), content) is None
