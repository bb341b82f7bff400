"""The hidden layer's products in parts of rows are those of plain PyTorch, forward and backward."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megasnn.layers import BuildContext, Numerics, ParallelConv, hidden_layer
from megasnn.layers.hidden_layer import linear_gelu_linear
from megasnn.layers.shape_inference import BoundsInference, mark_spikes
from megasnn.layers.tensors import materialise
from tests.distributed.whole import channels_last, random

T, N, C, H, L = 2, 3, 8, 20, 7
CONTEXT = BuildContext(numerics=Numerics(torch.float64, torch.float64), time_steps=T)


def plain(first: ParallelConv, second: ParallelConv, x: Tensor, scale: Tensor | float) -> Tensor:
    of_step = scale.view(-1, 1, 1, 1) if isinstance(scale, Tensor) else scale
    hidden = torch.einsum("hc,tncl->tnhl", first.weight.squeeze(-1), x) * of_step + first.bias.view(-1, 1)
    return torch.einsum("ch,tnhl->tncl", second.weight.squeeze(-1), F.gelu(hidden)) + second.bias.view(-1, 1)


# Hidden values in a part: of one row, of some rows of which the last part has fewer, and of all.
@pytest.mark.parametrize("values", [1, 5 * H, 1 << 19])
@pytest.mark.parametrize("scale", [1.0, 0.5, torch.tensor([0.5, 2.0], dtype=torch.float64)])
def test_parts_of_the_hidden_layer_are_the_whole(
    monkeypatch: pytest.MonkeyPatch, values: int, scale: Tensor | float
) -> None:
    monkeypatch.setattr(hidden_layer, "HIDDEN_AT_ONCE", values)
    first = ParallelConv(C, H, 1, CONTEXT, style="column", bias=True, dims=1)
    second = ParallelConv(H, C, 1, CONTEXT, style="row", bias=True, dims=1)
    with BoundsInference():
        linear_gelu_linear(first, second, mark_spikes(torch.empty(T, N, C, L, device="meta"), lowest=-1), 1.0)
    materialise([("first", first), ("second", second)], torch.device("cpu"), seed=0)
    tensors = [first.weight, first.bias, second.weight, second.bias]
    x = channels_last(random(T, N, C, L, seed=1).clamp(-1, 1).round() + 0.0).requires_grad_()
    weights = random(T, N, C, L, seed=2)
    expected = plain(first, second, x, scale)
    of_expected = torch.autograd.grad((expected * weights).sum(), [x, *tensors])
    found = linear_gelu_linear(first, second, x, scale)
    (found * weights).sum().backward()
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    for tensor, gradient in zip([x, *tensors], of_expected, strict=True):
        torch.testing.assert_close(tensor.grad, gradient, rtol=1e-12, atol=1e-12)
