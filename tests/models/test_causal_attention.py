"""Causal attention on one rank is plain PyTorch's, with softmax by a mask and on spikes by explicit sums."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from megasnn.layers import BuildContext, Numerics, causal_softmax, token_chunks
from megasnn.layers.causal_attention import CausalAttention
from megasnn.layers.causal_spiking_attention import CausalSpikingAttention, exact_up_to
from megasnn.layers.shape_inference import BoundsInference, mark_spikes
from tests.distributed.whole import channels_last, random, spikes

T, N, HEADS, WIDTH = 2, 3, 2, 6
DIM = HEADS * WIDTH
CLOSE = dict(rtol=1e-12, atol=1e-12)


def context(dtype: torch.dtype = torch.float64) -> BuildContext:
    return BuildContext(numerics=Numerics(dtype, dtype))


def split(qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v `[T, N, heads, L, d]`."""
    q, k, v = qkv.unflatten(2, (3, HEADS, WIDTH)).transpose(-2, -1).unbind(2)
    return q, k, v


def softmax_reference(qkv: Tensor, base: float | None) -> Tensor:
    q, k, v = split(qkv)
    if base is not None:
        q, k = turned(q, base), turned(k, base)
    scores = q @ k.transpose(-2, -1) / math.sqrt(WIDTH)
    later = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
    out = scores.masked_fill(later, -math.inf).softmax(-1) @ v
    return out.transpose(-2, -1).flatten(2, 3)


def turned(x: Tensor, base: float) -> Tensor:
    """Rotary positions as products of complex numbers: halves are real and imaginary parts."""
    angles = torch.outer(
        torch.arange(x.shape[-2], dtype=torch.float64),
        torch.tensor([base ** (-2 * pair / WIDTH) for pair in range(WIDTH // 2)], dtype=torch.float64),
    )
    halves = x.unflatten(-1, (2, WIDTH // 2))
    numbers = torch.complex(halves[..., 0, :], halves[..., 1, :]) * torch.polar(torch.ones_like(angles), angles)
    return torch.cat([numbers.real, numbers.imag], -1)


def spiking_reference(qkv: Tensor, scale: float) -> Tensor:
    q, k, v = split(qkv)
    state = torch.zeros(T, N, HEADS, WIDTH, WIDTH, dtype=qkv.dtype)
    rows = []
    for token in range(qkv.shape[-1]):
        state = state + k[..., token, :, None] * v[..., token, None, :]
        rows.append((q[..., token, :, None] * state).sum(-2) * scale)
    return torch.stack(rows, -1).flatten(2, 3)


def results(layer: torch.nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
    """The output, and the gradient of the input for random gradients of the output."""
    x = x.detach().requires_grad_()
    y = layer(x)
    (gradient,) = torch.autograd.grad(y, x, random(*y.shape, seed=9, dtype=y.dtype))
    return y.detach(), gradient


@pytest.mark.parametrize("base", [None, 100.0])
def test_softmax_attention_is_that_of_a_mask(base: float | None) -> None:
    layer = CausalAttention(DIM, HEADS, context(), rotary_base=base)
    x = channels_last(random(T, N, 3 * DIM, 11, seed=1))
    assert layer(x.to("meta")).shape == (T, N, DIM, 11)
    for found, expected in zip(results(layer, x), results(lambda x: softmax_reference(x, base), x), strict=True):
        torch.testing.assert_close(found, expected, **CLOSE)


@pytest.mark.parametrize("probabilities", [1, 3 * 64 * 150, 1 << 18])
def test_softmax_attention_in_blocks_is_that_of_a_mask(monkeypatch: pytest.MonkeyPatch, probabilities: int) -> None:
    """Sequences of several blocks of queries, with one head, three heads and all frames at once."""
    monkeypatch.setattr(causal_softmax, "PROBABILITIES_AT_ONCE", probabilities)
    x = channels_last(random(T, N, 3 * DIM, 150, seed=1))
    expected = results(lambda x: softmax_reference(x, 100.0), x)
    for found, each in zip(
        results(CausalAttention(DIM, HEADS, context(), rotary_base=100.0), x), expected, strict=True
    ):
        torch.testing.assert_close(found, each, **CLOSE)


def learned(
    length: int = 11, dtype: torch.dtype = torch.float64, lowest: int = 0, **options: float
) -> CausalSpikingAttention:
    layer = CausalSpikingAttention(DIM, HEADS, context(dtype), **options)
    with BoundsInference():
        layer(mark_spikes(torch.empty(T, N, 3 * DIM, length, device="meta"), lowest=lowest))
    return layer


def ternary(*shape: int, seed: int = 0) -> Tensor:
    # 0.0, as neurons give it, in place of -0.0.
    return random(*shape, seed=seed).clamp(-1, 1).round() + 0.0


@pytest.mark.parametrize("lowest", [0, -1])
@pytest.mark.parametrize("chunk", [1, 4, 64])
def test_spiking_attention_is_that_of_explicit_sums(chunk: int, lowest: int) -> None:
    """Exactly, for every length of the chunks; its gradient in float64 closely."""
    values = spikes if lowest == 0 else ternary
    x = channels_last(values(T, N, 3 * DIM, 11, seed=1))
    assert x.min() == lowest
    expected, of_expected = results(lambda x: spiking_reference(x, 0.25), x)
    found, gradient = results(learned(chunk=chunk, scale=0.25, lowest=lowest), x)
    assert torch.equal(found, expected) and found.any()
    torch.testing.assert_close(gradient, of_expected, **CLOSE)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_whole_numbers_round_once(dtype: torch.dtype) -> None:
    """Sums that bfloat16 does not hold are exact before they are rounded."""
    x = channels_last((random(T, N, 3 * DIM, 300, seed=2) > -1.5).to(dtype))
    exact = spiking_reference(x.double(), 1.0)
    assert exact.max() > 256
    found, gradient = results(learned(length=300, dtype=dtype, scale=1.0, chunk=32), x)
    assert found.dtype == gradient.dtype == dtype and torch.equal(found, exact.to(dtype))


def test_inputs_that_give_no_exact_sums_are_refused() -> None:
    layer = CausalSpikingAttention(DIM, HEADS, context(torch.float32))
    with pytest.raises(ValueError, match="takes spikes"):
        layer(torch.empty(T, N, 3 * DIM, 4, device="meta"))
    assert exact_up_to(torch.float32) == 2**24 and exact_up_to(torch.float64) == 2**53
    longest = 2**24 // WIDTH
    learned(length=longest, dtype=torch.float32)
    with pytest.raises(ValueError, match=f"{longest + 1} tokens with heads of 6 .*--precision fp64"):
        learned(length=longest + 1, dtype=torch.float32)
    learned(length=longest + 1, dtype=torch.float64)
    rounding = CausalSpikingAttention(DIM, HEADS, BuildContext(numerics=Numerics(rounds=True)))
    with BoundsInference():
        rounding(mark_spikes(torch.empty(T, N, 3 * DIM, 2048, device="meta")))
        with pytest.raises(ValueError, match="2049 tokens .*--precision tf32 rounds whole numbers above 2048"):
            rounding(mark_spikes(torch.empty(T, N, 3 * DIM, 2049, device="meta")))
    with pytest.raises(ValueError, match=r"takes q, k and v \[T, N, 36, L\]"):
        layer(torch.empty(T, N, 35, 4, device="meta"))
    with pytest.raises(ValueError, match="5 tokens, and the dry run saw 4"):
        learned(length=4)(random(T, N, 3 * DIM, 5))
    with pytest.raises(ValueError, match="even size"):
        CausalAttention(6, 2, context())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_parts_of_a_sequence_are_the_whole_one(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> None:
    """Many tokens are computed part by part, few tokens several frames at once: output and gradient keep their bits."""
    x = channels_last(ternary(T, N, 3 * DIM, 75, seed=1).to(dtype))
    layer = learned(length=75, dtype=dtype, chunk=4, lowest=-1)
    whole = results(layer, x)
    for tokens in (4, 12, 80, 160):
        monkeypatch.setattr(token_chunks, "VALUES_AT_ONCE", tokens * DIM)
        for found, expected in zip(results(layer, x), whole, strict=True):
            assert torch.equal(found, expected)


def test_operations_grow_with_the_length_as_it_does() -> None:
    counts = []
    for length in (128, 1024):
        x = channels_last(spikes(T, N, 3 * DIM, length, seed=1)).requires_grad_()
        layer = learned(length=length)
        with FlopCounterMode(display=False) as counter:
            layer(x).sum().backward()
        counts.append(counter.get_total_flops())
    assert counts[1] == 8 * counts[0] > 0


@pytest.mark.parametrize(("lowest", "bits"), [(0, 1), (-1, 2)])
def test_backward_keeps_bits(lowest: int, bits: int) -> None:
    values = spikes if lowest == 0 else ternary
    x = channels_last(values(T, N, 3 * DIM, 16, seed=1)).float().requires_grad_()
    kept: list[Tensor] = []

    def keep(tensor: Tensor) -> Tensor:
        kept.append(tensor)
        return tensor

    layer = learned(length=16, dtype=torch.float32, lowest=lowest)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        layer(x)
    assert sum(tensor.nbytes for tensor in kept) == bits * x.numel() // 8
