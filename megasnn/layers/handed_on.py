"""The memory order in which layers hand on what they give, in every layout: so a pipeline need not ask for it."""

from __future__ import annotations

from torch import Tensor, nn


def hands_on_channels_last(layer: nn.Module) -> bool:
    """Whether what a layer gives is `handed_on`: that of a layer made of MegaSNN's layers is, and plain modules, those
    of megasnn/layers/whole.py, give theirs as they please."""
    return "_call" not in vars(layer)


def handed_on(y: Tensor) -> Tensor:
    """What a layer made of MegaSNN's layers has given, with its channels last in memory; its gradient will be so, too.

    As a rule they are, and nothing is copied. A repeated value (stride 0) has no place in memory, and stays.
    """
    y = channels_last(y)
    if y.requires_grad and y.grad_fn is not None:
        y.register_hook(channels_last)
    return y


def channels_last(x: Tensor) -> Tensor:
    """`[T, N, C, ...]` with its channels side by side in memory, other tensors contiguous; itself where it is so."""
    if any(stride == 0 and size > 1 for stride, size in zip(x.stride(), x.shape, strict=True)):
        return x
    if x.ndim < 4:
        return x.contiguous()
    pixels = x.movedim(2, -1)
    return x if pixels.is_contiguous() else pixels.contiguous().movedim(-1, 2)
