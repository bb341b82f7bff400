"""Attention on spikes: over heads that tensor-parallel ranks share, over tokens that ranks share, and its exact
products."""

from __future__ import annotations

from dataclasses import replace
from unittest import mock

import pytest
import torch
from torch import Tensor

from megasnn.layers import attention
from megasnn.layers.attention import EXACT_BFLOAT16, SpikingAttend, SpikingAttendSizes, exact_type
from megasnn.layers.row_context import sum_for_each
from megasnn.parallel.sharding import own_span
from tests.distributed.whole import everybody, random, spikes

FRAMES, HEADS, WIDTH = 2, 3, 8


def attended(tokens: int, dtype: torch.dtype, every: float | None = None) -> tuple[Tensor, Tensor]:
    """The result for random spikes, or for values that are all the same, and its gradient."""
    rows = spikes(FRAMES * tokens, 3 * HEADS * WIDTH, dtype=dtype)
    rows = (rows if every is None else torch.full_like(rows, every)).requires_grad_()
    out = SpikingAttend.apply(rows, None, SpikingAttendSizes(HEADS, FRAMES, tokens))
    (gradient,) = torch.autograd.grad(out, rows, random(*out.shape, seed=1, dtype=dtype))
    return out.detach(), gradient


@pytest.mark.parametrize("width", [5, WIDTH])
def test_a_head_is_attention_by_its_equation(width: int) -> None:
    """Outputs and gradients, of heads whose bits begin in bytes of their own or not."""
    rows = spikes(FRAMES * 4, 3 * HEADS * width, dtype=torch.float64).requires_grad_()
    out = SpikingAttend.apply(rows, None, SpikingAttendSizes(HEADS, FRAMES, 4))
    q, k, v = rows.view(FRAMES, 4, 3, HEADS, width).transpose(1, 3).unbind(2)
    expected = (q @ k.transpose(-2, -1) @ v * 0.125).transpose(1, 2).reshape(FRAMES * 4, -1)
    grad = random(*out.shape, seed=1)
    assert torch.equal(out, expected) and out.any()
    found, wanted = (torch.autograd.grad(each, rows, grad)[0] for each in (out, expected))
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)


def emulated(q: Tensor, kv: Tensor, dtype: torch.dtype) -> Tensor:
    """As a GPU adds products of bfloat16."""
    return (q.float() @ kv.float()).to(dtype)


@pytest.mark.parametrize("every", [None, 1.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sums_of_spikes_are_exact_in_bfloat16(dtype: torch.dtype, every: float | None) -> None:
    """On tensor cores: emulated here, the result is the same bit for bit, up to as many tokens as bfloat16 counts."""
    expected, of_expected = attended(EXACT_BFLOAT16, dtype, every)
    with (
        mock.patch.object(attention, "exact_type", return_value=torch.bfloat16),
        mock.patch.object(attention, "product", emulated),
    ):
        out, gradient = attended(EXACT_BFLOAT16, dtype, every)
    assert out.dtype == dtype and torch.equal(out, expected)
    if dtype == torch.float32:
        assert torch.equal(gradient, of_expected)
    else:  # one gradient on the way is rounded to bfloat16
        torch.testing.assert_close(gradient, of_expected, rtol=0.03, atol=0.03 * float(of_expected.abs().mean()))
    ones = torch.ones(1, EXACT_BFLOAT16 + 1)
    assert (ones @ ones.t()).bfloat16() == EXACT_BFLOAT16, "one token more is too many"


def test_only_a_gpu_takes_bfloat16_for_that() -> None:
    for dtype, exact in ((torch.float32, torch.float32), (torch.bfloat16, torch.float32), (torch.float64,) * 2):
        assert exact_type(torch.empty(4, dtype=dtype), 4) == exact


def _on_own_tokens(tokens: int) -> tuple[Tensor, Tensor]:
    """What a rank makes of its tokens, where ranks share them out; and what it makes of all, by itself."""
    group, sizes = everybody("cp"), SpikingAttendSizes(HEADS, FRAMES, tokens)
    rows = spikes(FRAMES, tokens, 3 * HEADS * WIDTH, dtype=torch.float32)
    mine = own_span(tokens, group.sizes, group.rank)
    own = rows[:, mine.start : mine.stop]
    whole = SpikingAttend.apply(rows.flatten(0, 1), None, sizes)
    shared = SpikingAttend.apply(own.flatten(0, 1), None, replace(sizes, group=group))
    counted = sum_for_each(own.sum(1), group)  # as spike-driven attention counts tokens
    assert torch.equal(counted, rows.sum(1)) and counted.max() > 0
    return shared.unflatten(0, (FRAMES, -1)), whole.unflatten(0, (FRAMES, -1))


@pytest.mark.parametrize(("size", "tokens"), [(2, 7), (4, 64), (3, 300)])
def test_tokens_that_ranks_share_give_the_same_bits(ranks, size: int, tokens: int) -> None:
    """In float32, for equal spikes; sums of up to 255 travel in a byte, larger ones in two."""
    found = ranks(size, _on_own_tokens, tokens)
    whole = found[0][1]
    assert torch.equal(torch.cat([shared for shared, _ in found], 1), whole) and whole.max() > 0


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("tokens", [64, EXACT_BFLOAT16, EXACT_BFLOAT16 + 1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_on_a_gpu(dtype: torch.dtype, tokens: int) -> None:
    rows = spikes(FRAMES * tokens, 3 * HEADS * WIDTH, dtype=dtype)
    sizes = SpikingAttendSizes(HEADS, FRAMES, tokens)
    expected = SpikingAttend.apply(rows, None, sizes)
    assert torch.equal(SpikingAttend.apply(rows.cuda(), None, sizes).cpu(), expected)
