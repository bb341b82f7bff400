"""Bits and bytes: what is packed comes back exactly, in the same places, or is refused."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megasnn.kernels import codec
from megasnn.kernels.codec import pack_bits, pack_counts, unpack_bits, unpack_bits_into, unpack_counts

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.uint8, torch.bool, torch.int64]
shapes = st.lists(st.integers(1, 9), min_size=1, max_size=4)


@st.composite
def dense_tensors(draw, high: int):
    """Integers below ``high``, in any dtype that holds them, shape, and memory order."""
    shape = draw(shapes)
    dtype = draw(st.sampled_from(DTYPES if high == 2 else DTYPES[:5] + DTYPES[6:]))
    order = draw(st.permutations(range(len(shape))))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    values = torch.randint(0, high, shape, generator=generator)
    return values.to(dtype).permute(order)


@pytest.fixture(params=["compiled", "plain"], autouse=True)
def loops(request, monkeypatch):
    """Every test runs with the compiled loops and with tensor operations."""
    if request.param == "plain":
        monkeypatch.setattr(codec, "_loops", lambda: None)
    else:
        assert codec._loops() is not None


@settings(max_examples=60, deadline=None)
@given(dense_tensors(2))
def test_bits_round_trip(x):
    packed = pack_bits(x, check=True)
    assert packed.dtype == torch.uint8 and packed.shape == ((x.numel() + 7) // 8,)
    back = unpack_bits(packed, x.shape, x.stride(), x.dtype)
    assert torch.equal(back, x) and back.stride() == x.stride()


@settings(max_examples=60, deadline=None)
@given(dense_tensors(256))
def test_counts_round_trip(x):
    packed = pack_counts(x, check=True)
    assert packed.dtype == torch.uint8 and packed.shape == (x.numel(),)
    out = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype)
    assert unpack_counts(packed, x.shape, out=out) is out
    assert torch.equal(out, x)


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 9), st.lists(st.integers(1, 20), min_size=1, max_size=4), st.sampled_from(DTYPES), st.integers(0))
def test_shards_of_channels(rows, channels, dtype, seed):
    """Every rank packs its channels; together they make the whole tensor."""
    generator = torch.Generator().manual_seed(seed % 2**31)
    whole = torch.randint(0, 2, (rows, sum(channels)), generator=generator).to(dtype)
    out = torch.full_like(whole, 1)
    for target, shard in zip(out.split(channels, dim=1), whole.split(channels, dim=1), strict=True):
        unpack_bits_into(pack_bits(shard.contiguous()), target)
    assert torch.equal(out, whole)


def test_bit_order_is_memory_order_from_the_lowest_bit():
    x = torch.zeros(2, 1, 3, 3)
    x[0, 0, 1, 0] = x[1, 0, 2, 2] = 1
    assert pack_bits(x).tolist() == [8, 0, 2]
    last = x.movedim(2, -1).contiguous().movedim(-1, 2)  # channels fastest
    assert pack_bits(last).tolist() == [2, 0, 2]
    assert pack_bits(torch.ones(3)).tolist() == [7]


def test_large_tensor_spans_units_of_work():
    x = (torch.rand(5, 50001, generator=torch.Generator().manual_seed(0)) < 0.3).float()
    packed = pack_bits(x, check=True)
    assert torch.equal(packed, codec._pack_bits_plain(x.view(-1)))
    assert torch.equal(unpack_bits(packed, x.shape), x)
    counts = torch.arange(5 * 50001).view(5, 50001).remainder(256).double()
    assert torch.equal(unpack_counts(pack_counts(counts, check=True), counts.shape, dtype=torch.float64), counts)


def test_gaps_and_empty_tensors():
    x = (torch.arange(24).view(4, 6) % 5 == 0).float()
    assert torch.equal(pack_bits(x[:, ::2]), pack_bits(x[:, ::2].contiguous()))
    assert pack_bits(torch.empty(0, 3)).shape == (0,)
    assert unpack_bits(torch.empty(0, dtype=torch.uint8), (0, 3)).shape == (0, 3)
    assert pack_counts(torch.empty(0)).shape == (0,)


@pytest.mark.parametrize("place", [0, 7, 64, 100])
@pytest.mark.parametrize("value", [0.5, 2.0, -1.0, float("nan"), float("inf"), 1.01])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_pack_bits_refuses(place, value, dtype):
    x = torch.zeros(101, dtype=dtype)
    x[place] = value
    with pytest.raises(ValueError, match="pack_bits takes 0 and 1, got values from"):
        pack_bits(x, check=True)
    pack_bits(x)


@pytest.mark.parametrize("value", [0.5, 256.0, -1.0, float("nan"), float("inf"), 1e30])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_pack_counts_refuses(value, dtype):
    x = torch.zeros(101, dtype=dtype)
    x[3] = value
    with pytest.raises(ValueError, match="pack_counts takes integers from 0 to 255, got values from"):
        pack_counts(x, check=True)


def test_unpack_refuses():
    packed = torch.zeros(2, dtype=torch.uint8)
    with pytest.raises(ValueError, match=r"17 spikes take uint8 \[3\], got torch.uint8 \(2,\)"):
        unpack_bits(packed, (17,))
    with pytest.raises(ValueError, match=r"got torch.int64"):
        unpack_bits(packed.long(), (16,))
    with pytest.raises(ValueError, match="needs a dense one"):
        unpack_bits(packed, (4, 4), out=torch.zeros(4, 8)[:, ::2])
    with pytest.raises(ValueError, match="needs a dense one"):
        unpack_bits(packed, (4, 4), strides=(8, 1))
    with pytest.raises(ValueError, match="rows and columns"):
        unpack_bits_into(packed, torch.zeros(16))
    with pytest.raises(ValueError, match="2 packed values"):
        unpack_counts(packed, (3,))


def test_more_values_than_the_kernels_can_count_are_left_to_torch(monkeypatch):
    pytest.importorskip("triton")
    monkeypatch.setattr(codec, "usable_on", lambda device: True)
    assert codec._on_gpu(torch.empty(2**30, device="meta")) is not None
    assert codec._on_gpu(torch.empty(2**31, device="meta")) is None
