"""Facts about tensors that a dry run finds: layers run once on the meta device, where tensors have no values.

Neurons give spikes, 0 or 1. What is computed from spikes without leaving the whole numbers (a sum of two branches, a
product, max pooling, another view) has a largest value that is known: such tensors travel and are kept as bits or
bytes, and the value is checked wherever one is packed.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from megasnn.kernels.layout import channels_last
from megasnn.kernels.spike_codec import Content

LARGEST_COUNT = 255  # what a byte holds

# By the names of torch's functions and methods: what gives some of the values of its inputs, and no others ...
_REARRANGE = {
    *("view", "reshape", "flatten", "unflatten", "permute", "transpose", "movedim", "t", "mT", "contiguous"),
    *("squeeze", "expand", "expand_as", "narrow", "select", "__getitem__", "chunk", "split", "unbind", "stack", "cat"),
    *("concat", "flip", "roll", "repeat", "clone", "detach", "to", "float", "double", "type", "type_as"),
    *("max_pool1d", "max_pool2d", "max_pool3d", "adaptive_max_pool2d", "amax", "relu", "index_select", "unsqueeze"),
}
# ... and what adds, multiplies, and takes from a number.
_ADD = {"add", "__add__", "__radd__", "__iadd__", "add_"}
_MULTIPLY = {"mul", "__mul__", "__rmul__", "__imul__", "mul_", "multiply", "logical_and"}
_SUBTRACT_FROM = {"rsub", "__rsub__"}


def mark_spikes(tensor: Tensor, largest: int = 1) -> Tensor:
    """Marks a tensor of the dry run as holding spikes, or whole numbers from 0 to `largest`, as it then travels and is
    kept. A forward of one's own says so of what it returns."""
    if tensor.is_meta:
        tensor._largest = largest  # type: ignore[attr-defined]
    return tensor


def max_of(value: Any) -> int | None:
    """The largest value that a tensor of the dry run, or a number, is known to hold; None where nothing is known."""
    if isinstance(value, Tensor):
        return getattr(value, "_largest", None)
    return int(value) if isinstance(value, (int, float)) and value >= 0 and value == int(value) else None


def content_of(tensor: Tensor) -> Content:
    """Content of a tensor of the dry run."""
    largest = 1 if tensor.dtype == torch.bool else max_of(tensor)
    if largest is None or largest > LARGEST_COUNT:
        return Content.DENSE
    return Content.SPIKES if largest <= 1 else Content.COUNTS


def mark_both(tensor: Tensor, other: Tensor) -> None:
    """Marks a tensor of the dry run with what it, or another one in its place, holds."""
    if Content.DENSE in (content_of(tensor), content_of(other)):
        tensor._largest = None  # type: ignore[attr-defined]
    elif content_of(other) is Content.COUNTS:
        mark_spikes(tensor, max(max_of(tensor) or 1, max_of(other) or 1))


def said_of_values(error: Exception) -> str | None:
    """Advice for a dry run that failed because tensors on the meta device have no values; None for other errors."""
    text = str(error).lower()
    if not isinstance(error, (RuntimeError, TypeError)) or "meta" not in text:
        return None
    if "expected device" in text:
        return "it joins tensors of two devices: make those of its own with device=x.device"
    return (
        "sizes and branches must not depend on values, which tensors lack while a model is built: sum x * mask for "
        "x[mask], take torch.where for `if`, and no .item() or NumPy"
    )


class MaxInference(TorchFunctionMode):
    """Marks every result of a torch function with the largest value that follows from its arguments."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        largest = _max_of_result(getattr(function, "__name__", ""), args)
        for each in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(each, Tensor) and largest is not None:
                mark_spikes(each, largest)
        return result


class RefuseRandom(TorchDispatchMode):
    """Raises ValueError for an operator that draws random numbers, which would depend on the layout."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.Tag.nondeterministic_seeded in func.tags:
            raise ValueError(
                f"{func.overloadpacket.__name__} draws random numbers that depend on the layout: use "
                "megasnn.ParallelDropout or DropPath"
            )
        return func(*args, **(kwargs or {}))


def _max_of_result(name: str, args: tuple[Any, ...]) -> int | None:
    if name in _REARRANGE:
        first = args[0] if args else None
        known = [max_of(each) for each in (first if isinstance(first, (tuple, list)) else (first,))]
        return None if None in known else max(each for each in known if each is not None)
    if len(args) < 2:
        return None
    a, b = max_of(args[0]), max_of(args[1])
    if a is None or b is None:
        return None
    if name in _ADD:
        return a + b
    if name in _MULTIPLY:
        return a * b
    # 1 - x turns spikes into spikes, where x holds no more than them.
    return b if name in _SUBTRACT_FROM and args[1] == 1 and a <= 1 else None


# --- memory order


def is_channels_last(x: Tensor) -> bool:
    """Tells whether `[T, N, C, ...]` has its channels side by side in memory, or another tensor is contiguous."""
    return (x.movedim(2, -1) if x.ndim > 3 else x).is_contiguous()


def to_channels_last(y: Tensor) -> Tensor:
    """The output of a layer with its channels last in memory, and so its gradient. As a rule nothing is copied."""
    y = _in_order(y)
    if y.requires_grad and y.grad_fn is not None:
        y.register_hook(lambda gradient: None if gradient is None else _in_order(gradient))
    return y


def _in_order(x: Tensor) -> Tensor:
    """A tensor with its channels last; itself where it is so. A repeated value (stride 0) has no place in memory."""
    is_repeated = any(stride == 0 and size > 1 for stride, size in zip(x.stride(), x.shape, strict=True))
    if is_repeated or is_channels_last(x):
        return x
    return channels_last(x) if x.ndim > 3 else x.contiguous()
