"""Products of spikes in attention: exact in bfloat16, which tensor cores multiply, as far as it holds their sums."""

from __future__ import annotations

from dataclasses import replace
from unittest import mock

import pytest
import torch
from torch import Tensor

from megasnn.layers import attend
from megasnn.layers.attend import EXACT_BFLOAT16, Attend, AttendPlan, exact_type
from megasnn.parallel.alike import sum_for_each
from megasnn.parallel.sharding import own_rows
from tests.distributed.whole import everybody, random, spikes

FRAMES, HEADS, WIDTH = 2, 3, 8
PLAN = AttendPlan(FRAMES, HEADS)


def attended(tokens: int, dtype: torch.dtype, every: float | None = None) -> tuple[Tensor, Tensor]:
    """The result for random spikes, or for values that are all the same, and its gradient."""
    rows = spikes(FRAMES * tokens, 3 * HEADS * WIDTH, dtype=dtype)
    rows = (rows if every is None else torch.full_like(rows, every)).requires_grad_()
    out = Attend.apply(rows, None, PLAN)
    (gradient,) = torch.autograd.grad(out, rows, random(*out.shape, seed=1, dtype=dtype))
    return out.detach(), gradient


def emulated(q: Tensor, kv: Tensor, dtype: torch.dtype) -> Tensor:
    """As a GPU adds products of bfloat16."""
    return (q.float() @ kv.float()).to(dtype)


@pytest.mark.parametrize("every", [None, 1.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sums_of_spikes_are_exact_in_bfloat16(dtype: torch.dtype, every: float | None) -> None:
    """On tensor cores: emulated here, the result is the same bit for bit, up to as many tokens as bfloat16 counts."""
    expected, of_expected = attended(EXACT_BFLOAT16, dtype, every)
    with (
        mock.patch.object(attend, "exact_type", return_value=torch.bfloat16),
        mock.patch.object(attend, "product", emulated),
    ):
        out, gradient = attended(EXACT_BFLOAT16, dtype, every)
    assert out.dtype == dtype and torch.equal(out, expected)
    if dtype == torch.float32:
        assert torch.equal(gradient, of_expected)
    else:  # one gradient on the way is rounded to bfloat16
        torch.testing.assert_close(gradient, of_expected, rtol=0.03, atol=0.03 * float(of_expected.abs().mean()))


def _on_own_tokens(tokens: int, plan: AttendPlan) -> tuple[Tensor, Tensor]:
    """What a rank makes of its tokens, where ranks share them out; and what it makes of all, by itself."""
    group = everybody("context")
    rows = spikes(FRAMES, tokens, 3 * HEADS * WIDTH, dtype=torch.float32)
    mine = own_rows(tokens, group.size, group.rank)
    own = rows[:, mine.start : mine.stop]
    whole = Attend.apply(rows.flatten(0, 1), None, plan)
    shared = Attend.apply(own.flatten(0, 1), None, replace(plan, shared=(group, tokens)))
    return shared.unflatten(0, (FRAMES, -1)), whole.unflatten(0, (FRAMES, -1))


@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize(("size", "tokens"), [(2, 7), (4, 64), (3, 300)])
def test_tokens_that_ranks_share_give_the_same_bits(ranks, size: int, tokens: int, sparse: bool) -> None:
    """In float32, for equal spikes; sums of up to 255 travel in a byte, larger ones in two."""
    found = ranks(size, _on_own_tokens, tokens, replace(PLAN, sparse=sparse))
    whole = found[0][1]
    assert torch.equal(torch.cat([shared for shared, _ in found], 1), whole) and whole.max() > 0


def _counted(tokens: int) -> tuple[Tensor, Tensor]:
    """In how many tokens each channel fires, as spike-driven attention counts them: over all ranks, and on one."""
    group, fired = everybody("context"), spikes(FRAMES, WIDTH, tokens, dtype=torch.float32)
    mine = own_rows(tokens, group.size, group.rank)
    return sum_for_each(fired[..., mine.start : mine.stop].sum(-1), group), fired.sum(-1)


def test_spikes_that_ranks_count_together_are_counted_exactly(ranks) -> None:
    for shared, whole in ranks(4, _counted, 300):
        assert torch.equal(shared, whole) and whole.max() > 0


def test_one_token_more_is_too_many() -> None:
    ones = torch.ones(1, EXACT_BFLOAT16 + 1)
    assert (ones @ ones.t()).bfloat16() == EXACT_BFLOAT16


def test_only_a_gpu_takes_bfloat16_for_that() -> None:
    for dtype, exact in ((torch.float32, torch.float32), (torch.bfloat16, torch.float32), (torch.float64,) * 2):
        assert exact_type(torch.empty(4, dtype=dtype), 4) == exact


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("tokens", [64, EXACT_BFLOAT16, EXACT_BFLOAT16 + 1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_on_a_gpu(dtype: torch.dtype, tokens: int) -> None:
    rows = spikes(FRAMES * tokens, 3 * HEADS * WIDTH, dtype=dtype)
    expected = Attend.apply(rows, None, PLAN)
    assert torch.equal(Attend.apply(rows.cuda(), None, PLAN).cpu(), expected)
