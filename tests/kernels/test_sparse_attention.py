"""Attention from the bits of spikes: against dense products of the same spikes."""

from __future__ import annotations

from dataclasses import replace
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megasnn.kernels.sparse import attention as sparse_attention
from megasnn.layers import attend
from megasnn.layers.attend import Attend, AttendPlan
from tests.kernels.threads import torch_threads


def output_and_gradient(rows: torch.Tensor, plan: AttendPlan) -> tuple[torch.Tensor, torch.Tensor]:
    rows = rows.clone().requires_grad_()
    out = Attend.apply(rows, None, plan)
    grad = torch.randn(out.shape, generator=torch.Generator().manual_seed(1), dtype=rows.dtype)
    (gradient,) = torch.autograd.grad(out, rows, grad)
    return out.detach(), gradient


@settings(deadline=None, max_examples=60)
@given(
    st.integers(1, 3),
    st.integers(1, 70),
    st.integers(1, 3),
    st.sampled_from([8, 16, 24, 32, 56, 64, 72, 136]),
    st.sampled_from([0.0, 0.1, 0.5, 1.0]),
    st.sampled_from([torch.float32, torch.float64]),
    st.integers(1, 2),
    st.integers(0, 2**31),
)
def test_any_heads(
    frames: int, tokens: int, heads: int, d: int, share: float, dtype: torch.dtype, threads: int, seed: int
) -> None:
    """Outputs are the same bits; gradients differ by rounding."""
    torch.manual_seed(seed)
    rows = (torch.rand(frames * tokens, 3 * heads * d) < share).to(dtype)
    dense = AttendPlan(frames, heads)
    expected, of_expected = output_and_gradient(rows, dense)
    with torch_threads(threads), mock.patch.object(attend, "DenseHeads", side_effect=AssertionError("dense products")):
        out, gradient = output_and_gradient(rows, replace(dense, sparse=True))
    assert torch.equal(out, expected)
    error = 1e-13 if dtype == torch.float64 else 1e-5
    torch.testing.assert_close(gradient, of_expected, rtol=0, atol=error * (float(of_expected.abs().max()) + 1))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_what_has_no_loops_is_dense(dtype: torch.dtype) -> None:
    d = 8 if dtype == torch.bfloat16 else 12  # neither the type nor a slice that begins inside of a byte
    rows = (torch.rand(20, 3 * 2 * d) < 0.2).to(dtype)
    dense = AttendPlan(2, 2)
    with mock.patch.object(sparse_attention.SpikingHeads, "counts", side_effect=AssertionError("sums over spikes")):
        for found, expected in zip(
            output_and_gradient(rows, replace(dense, sparse=True)), output_and_gradient(rows, dense), strict=True
        ):
            assert torch.equal(found, expected)
