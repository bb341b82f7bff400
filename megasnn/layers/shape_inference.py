"""Facts from the dry run: layers run once on the meta device, where tensors have no values."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from megasnn.kernels.spike_codec import Content

LARGEST_COUNT = 255
"""Largest value of a byte."""

# Sums, products, max pooling and views of spikes are integers with known bounds, sent and stored as bits or bytes.
# Every packing checks the values.
# Names of torch's functions and methods whose results are values of their inputs.
_REARRANGE = {
    *("view", "reshape", "flatten", "unflatten", "permute", "transpose", "movedim", "t", "mT", "contiguous"),
    *("squeeze", "expand", "expand_as", "narrow", "select", "__getitem__", "chunk", "split", "unbind", "stack", "cat"),
    *("concat", "flip", "roll", "repeat", "clone", "detach", "to", "float", "double", "type", "type_as"),
    *("max_pool1d", "max_pool2d", "max_pool3d", "adaptive_max_pool2d", "amax", "relu", "index_select", "unsqueeze"),
}
# Functions, methods and operators of tensors for a + b, a * b and a - b with a number a.
_ADD = {"add", "__add__", "__radd__", "__iadd__", "add_"}
_MULTIPLY = {"mul", "__mul__", "__rmul__", "__imul__", "mul_", "multiply", "logical_and"}
_SUBTRACT_FROM = {"rsub", "__rsub__"}


class Bounds(NamedTuple):
    """Whole numbers from `lowest` to `largest`."""

    lowest: int
    largest: int


def mark_spikes(tensor: Tensor, largest: int = 1, lowest: int = 0) -> Tensor:
    """Marks a dry-run tensor as integers from `lowest` to `largest`, to be packed.

    Your own forward may do so. -1 to 1 are ternary spikes. Other values below 0 are not packed.
    """
    if tensor.is_meta:
        _mark(tensor, Bounds(lowest, largest))
    return tensor


def _mark(tensor: Tensor, bounds: Bounds | None) -> None:
    # torch's functions return new tensors, which know nothing of these bounds: an attribute cannot grow stale.
    tensor._bounds = bounds  # type: ignore[attr-defined]


def bounds_of(value: Any) -> Bounds | None:
    """A number's value or a dry-run tensor's known bounds; None if unknown."""
    if isinstance(value, Tensor):
        return getattr(value, "_bounds", None)
    if isinstance(value, (int, float)) and value >= 0 and value == int(value):
        return Bounds(int(value), int(value))
    return None


def content_of(tensor: Tensor) -> Content:
    bounds = Bounds(0, 1) if tensor.dtype == torch.bool else bounds_of(tensor)
    if bounds is None or bounds.largest > LARGEST_COUNT or bounds.lowest < -1:
        return Content.DENSE
    if bounds.lowest < 0:
        return Content.TERNARY if bounds.largest <= 1 else Content.DENSE
    return Content.SPIKES if bounds.largest <= 1 else Content.COUNTS


def mark_both(tensor: Tensor, other: Tensor) -> None:
    """Marks a dry-run tensor with the wider bounds of two; unknown if either is."""
    # Either tensor may stand in the other's place.
    if Content.DENSE in (content_of(tensor), content_of(other)):
        _mark(tensor, None)
        return
    together = _union([bounds_of(tensor) or Bounds(0, 1), bounds_of(other) or Bounds(0, 1)])
    mark_spikes(tensor, together.largest, together.lowest)


def _union(bounds: Sequence[Bounds]) -> Bounds:
    return Bounds(min(each.lowest for each in bounds), max(each.largest for each in bounds))


def said_of_values(error: Exception) -> str | None:
    """Advice, if the dry run needed values; None for other errors."""
    text = str(error).lower()
    if not isinstance(error, (RuntimeError, TypeError)) or "meta" not in text:
        return None
    if "expected device" in text:
        return "it joins tensors of two devices: create tensors with device=x.device"
    return (
        "sizes and branches must not depend on values, which tensors lack while a model is built: use sum(x * mask) "
        "for x[mask], torch.where for `if`, and no .item() or NumPy"
    )


class BoundsInference(TorchFunctionMode):
    """Marks torch functions' results with bounds, inferred from the arguments."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        bounds = _bounds_of_result(getattr(function, "__name__", ""), args)
        results = result if isinstance(result, (tuple, list)) else (result,)
        for each in results:
            if isinstance(each, Tensor) and bounds is not None:
                mark_spikes(each, bounds.largest, bounds.lowest)
        return result


class RefuseRandom(TorchDispatchMode):
    """Raises ValueError for torch's random operators."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # torch's numbers would depend on the layout.
        if torch.Tag.nondeterministic_seeded in func.tags:
            raise ValueError(
                f"{func.overloadpacket.__name__} draws random numbers that depend on the layout: use "
                "megasnn.ParallelDropout or DropPath"
            )
        return func(*args, **(kwargs or {}))


def _bounds_of_result(name: str, args: tuple[Any, ...]) -> Bounds | None:
    if name in _REARRANGE:
        first = args[0] if args else None
        inputs = first if isinstance(first, (tuple, list)) else (first,)
        known = [bounds for bounds in map(bounds_of, inputs) if bounds is not None]
        return _union(known) if known and len(known) == len(inputs) else None
    if len(args) < 2:
        return None
    a = bounds_of(args[0])
    b = bounds_of(args[1])
    if a is None or b is None:
        return None
    if name in _ADD:
        return Bounds(a.lowest + b.lowest, a.largest + b.largest)
    if name in _MULTIPLY:
        # A product of a negative value and 0 is -0, which no packing holds.
        return None if min(a.lowest, b.lowest) < 0 else Bounds(a.lowest * b.lowest, a.largest * b.largest)
    # 1 - x are spikes again, if x are spikes.
    return Bounds(b.lowest - a.largest, b.largest - a.lowest) if name in _SUBTRACT_FROM else None
