"""A function whose intermediate values are computed again in backward: of all of them, only its inputs are kept."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


def recomputed(function: Callable[..., tuple[Tensor, ...]], *inputs: Tensor | None) -> tuple[Tensor, ...]:
    """`function(*inputs)`, with the same bits and gradients.

    Args:
        function: without effects; gradients reach its arguments and nothing else.
    """
    if not torch.is_grad_enabled():
        return function(*inputs)
    return _Recomputed.apply(function, *inputs)


class _Recomputed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, function: Callable[..., tuple[Tensor, ...]], *inputs: Tensor | None) -> tuple[Tensor, ...]:
        ctx.function = function
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*inputs)
        return function(*inputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        needed = ctx.needs_input_grad[1:]
        inputs = [None if each is None else each.detach() for each in ctx.saved_tensors]
        wanted = [
            each.requires_grad_() for each, needs in zip(inputs, needed, strict=True) if each is not None and needs
        ]
        with torch.enable_grad():
            outputs = ctx.function(*inputs)
        given = [(output, grad) for output, grad in zip(outputs, grads, strict=True) if grad is not None]
        if not given:
            return (None, *(None for _ in needed))
        results, of_results = zip(*given, strict=True)
        found = iter(torch.autograd.grad(results, wanted, of_results, allow_unused=True))
        return (None, *(next(found) if needs else None for needs in needed))
