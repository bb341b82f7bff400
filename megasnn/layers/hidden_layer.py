"""Two linear layers with a GELU between them. Backward keeps the packed input alone.

The hidden values are four times as wide as the stream and dense, the input of spikes takes two bits a value. So the
first product is computed again in backward. A CPU computes both products for some rows at a time: the hidden values
stay in the cache.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megasnn.common.autograd import Function
from megasnn.common.recompute import cached_collective
from megasnn.kernels.spike_codec import Content, bits_of
from megasnn.layers.attention import sums_type
from megasnn.layers.conv import ParallelConv
from megasnn.layers.weight_grad import QueueGradient, add_product
from megasnn.layers.weighted import Communication, ProductOptions
from megasnn.parallel.collectives import (
    from_matrix,
    gather_columns,
    join_columns,
    sum_and_scatter_columns,
    to_matrix,
)

HIDDEN_AT_ONCE = 1 << 19
"""Hidden values that a CPU computes together: 2 MB in float32."""


def linear_gelu_linear(first: ParallelConv, second: ParallelConv, x: Tensor, scale: Tensor | float) -> Tensor:
    """second(gelu(scale * first(x) + bias)) on signals `[T, N, C_local, L]`. Backward keeps x alone, packed.

    Args:
        first, second: pointwise, in styles "column" and "row", with biases.
        scale: a number, or of each time step `[T]`.
    """
    assert first.bias is not None and second.bias is not None
    assert first.options.communication in (Communication.NONE, Communication.GATHER)
    assert second.options.communication in (Communication.NONE, Communication.SCATTER)
    is_observed = first.observer is not None or second.observer is not None
    # torch.export follows no autograd functions of Python, and runs with gradients.
    keeps_nothing = not torch.is_grad_enabled() or torch.compiler.is_exporting()
    if x.is_meta or is_observed or keeps_nothing:
        hidden = first(x, add_bias=False)
        if isinstance(scale, Tensor):
            hidden = hidden * scale.to(hidden.dtype).view(-1, 1, 1, 1)
        elif scale != 1.0:
            hidden = hidden * scale
        return second(F.gelu(hidden + first.bias.to(hidden.dtype).view(-1, 1)))
    kernel, anchor, queue_first = first.operand()
    second_kernel, second_anchor, queue_second = second.operand()
    layer = _HiddenLayer(first.options, scale, queue_first, queue_second)
    bits = bits_of(x, first.options.content)
    bias = first.bias.to(kernel.dtype)
    y = _LinearGeluLinear.apply(
        x.to(kernel.dtype), bits, kernel.flatten(1), bias, second_kernel.flatten(1), anchor, second_anchor, layer
    )
    return y + second.bias.to(y.dtype).view(-1, 1)


@dataclass(frozen=True)
class _HiddenLayer:
    """How to compute and learn the hidden layer.

    Attributes:
        options: of the first product.
        scale: of the first product, before its bias is added.
        queue_first, queue_second: take the gradients of the products' weights; None for a frozen weight.
    """

    options: ProductOptions
    scale: Tensor | float
    queue_first: QueueGradient | None
    queue_second: QueueGradient | None

    def parts(self, rows: Tensor, hidden: int) -> Iterator[_Part]:
        """Parts of rows `[T * n, C]`, for a number of hidden channels."""
        scale = self.scale
        if isinstance(scale, Tensor):
            # Rounded as in an evaluation, which multiplies by the scale in the products' type.
            scale = scale.to(rows.dtype).repeat_interleave(len(rows) // len(scale)).unsqueeze(1)
        size = max(HIDDEN_AT_ONCE // hidden, 1) if rows.device.type == "cpu" else len(rows)
        for start in range(0, len(rows), size):
            span = slice(start, start + size)
            yield _Part(span, scale[span] if isinstance(scale, Tensor) else scale)


@dataclass(frozen=True)
class _Part:
    """Some rows.

    Attributes:
        scale: of each row `[n, 1]`, or of all rows.
    """

    span: slice
    scale: Tensor | float

    def hidden(self, rows: Tensor, kernel: Tensor, bias: Tensor) -> Tensor:
        """Values before the GELU, for the part of all rows."""
        return self.scale_in_place(rows[self.span] @ kernel.T).add_(bias)

    def scale_in_place(self, values: Tensor) -> Tensor:
        """Values times their scale, in place."""
        if isinstance(self.scale, Tensor) or self.scale != 1.0:
            values *= self.scale
        return values


class _LinearGeluLinear(Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        bits: Tensor | None,
        kernel: Tensor,
        bias: Tensor,
        second_kernel: Tensor,
        anchor: Tensor | None,
        second_anchor: Tensor | None,
        layer: _HiddenLayer,
    ) -> Tensor:
        options = layer.options
        rows, payloads = gather_columns(to_matrix(x), options.group, options.content, bits=bits)
        ctx.layer = layer
        ctx.shape = x.shape
        ctx.save_for_backward(kernel, bias, second_kernel, *payloads)
        own = rows.new_empty((len(rows), len(second_kernel)))
        for part in layer.parts(rows, len(kernel)):
            torch.matmul(F.gelu(part.hidden(rows, kernel, bias)), second_kernel.T, out=own[part.span])
        summed = cached_collective(lambda: sum_and_scatter_columns(own, options.group)())
        return from_matrix(summed, x.shape)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        kernel, bias, second_kernel, *payloads = ctx.saved_tensors
        layer: _HiddenLayer = ctx.layer
        options = layer.options
        grad_rows, _ = gather_columns(to_matrix(grad), options.group, Content.DENSE)
        shape = (len(grad_rows), kernel.shape[1])
        rows = join_columns(payloads, options.content, shape, kernel.dtype)
        grad_x = torch.empty_like(rows)
        # A sum of many parts: bfloat16 would round each.
        grad_bias = bias.new_zeros(bias.shape, dtype=sums_type(bias.dtype))
        first_pairs = []
        second_pairs = []
        for part in layer.parts(rows, len(kernel)):
            grad_part = grad_rows[part.span]
            values = part.hidden(rows, kernel, bias)
            if layer.queue_second is not None:
                second_pairs.append((grad_part, F.gelu(values)))
            grad_hidden = torch.ops.aten.gelu_backward(grad_part @ second_kernel, values)
            grad_bias += grad_hidden.sum(0, dtype=grad_bias.dtype)
            # Only now: the bias is added after the scale. From here on this is the gradient of the product alone.
            part.scale_in_place(grad_hidden)
            torch.matmul(grad_hidden, kernel, out=grad_x[part.span])
            if layer.queue_first is not None:
                first_pairs.append((grad_hidden, rows[part.span]))
        finish = sum_and_scatter_columns(grad_x, options.group)
        if layer.queue_second is not None:
            layer.queue_second(partial(_add_weight_gradient, second_pairs))
        if layer.queue_first is not None:
            layer.queue_first(partial(_add_weight_gradient, first_pairs))
        return from_matrix(finish(), ctx.shape), None, None, grad_bias.to(bias.dtype), None, None, None, None


def _add_weight_gradient(parts: Sequence[tuple[Tensor, Tensor]], total: Tensor) -> None:
    """Adds the gradient of a weight, from parts of the rows of its output's gradient and of its input."""
    weight = total.flatten(1)
    for grad, rows in parts:
        add_product(grad, rows, weight)
