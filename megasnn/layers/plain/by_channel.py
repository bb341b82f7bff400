"""Decides if a tensor-parallel rank may compute a layer with its own channels, or the layer is whole.

MegaSNN's layers exchange the channels they need. User code between them does not, so it may only join tensors element
by element. Whole is always right, but costs more.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from types import FrameType
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from megasnn.common.bundle import Bundle, entries_of
from megasnn.layers.blocks import ConvNormNeuron
from megasnn.layers.conv import ParallelConv
from megasnn.layers.facts import facts
from megasnn.layers.layer import FunctionLayer, LayerTraits
from megasnn.layers.linear import MeanLinear, ParallelLinear
from megasnn.layers.plain.refusals import is_by_channel
from megasnn.layers.plain.table import class_name
from megasnn.layers.row_context import MeanOverSpace

# Names of torch's functions and methods, without underscores, that work element by element.
_ELEMENTWISE = {
    *("add", "radd", "iadd", "sub", "rsub", "isub", "mul", "rmul", "imul", "div", "truediv", "rtruediv", "itruediv"),
    *("neg", "pow", "abs", "exp", "log", "sqrt", "square", "sigmoid", "tanh", "relu", "gelu", "silu", "softplus"),
    *("clamp", "round", "floor", "ceil", "sign", "maximum", "minimum", "where", "gt", "ge", "lt", "le", "logical_and"),
    *("detach", "clone", "to", "float", "double", "zeros_like", "ones_like"),
}
# SpikingJelly's, which only move time.
_CONTAINERS = {"SeqToANNContainer", "MultiStepContainer"}
_OURS = "megasnn."
_LIBRARIES = ("torch.", "spikingjelly.", "einops.")
_STOCK = (_OURS, "torch.nn.", "spikingjelly.")


def may_be_cut(layer: nn.Module, inputs: Sequence[Bundle], cuts: Sequence[bool], is_first: bool) -> bool:
    """Whether own channels suffice, judged by a layer's modules. `ChannelWatch` judges the code.

    A layer's own `cut_inputs` comes first.

    Args:
        inputs: on the meta device.
        cuts: for each input tensor, True if a rank has only its own channels.
        is_first: the only input is the model's, whole on every rank.
    """
    cut_inputs = getattr(layer, "cut_inputs", LayerTraits.cut_inputs)
    if cut_inputs is not None:
        return tuple(cuts) == cut_inputs
    dims: set[int] = set()
    for bundle in inputs:
        dims.update(x.ndim for x in entries_of(bundle).values())
    if not _is_known(layer):
        return all(cuts) and _keeps_channels(layer, max(dims))
    is_linear = isinstance(layer, ParallelLinear) and not isinstance(layer, MeanLinear)
    if _blocks_of(layer) > 1 or (is_linear and dims != {3}):
        return False
    begins = (
        isinstance(layer, (ConvNormNeuron, ParallelConv))
        or is_linear
        or type(layer).__module__.startswith("megasnn.models.")
    )
    return all(cuts) or (is_first and (begins or is_linear))


def _module_of_forward(module: nn.Module) -> str:
    name: str = getattr(module.forward, "func", module.forward).__module__
    return name


def _is_known(layer: nn.Module) -> bool:
    for each in layer.modules():
        if isinstance(each, FunctionLayer) or not _module_of_forward(each).startswith(_OURS):
            return False
    return True


def is_of_libraries(layer: nn.Module) -> bool:
    """Whether all code in a layer, hooks included, is MegaSNN's, torch.nn's or SpikingJelly's."""
    for each in layer.modules():
        for name in (type(each).__module__, _module_of_forward(each)):
            if not f"{name}.".startswith(_STOCK):
                return False
        if isinstance(each, FunctionLayer) or each._forward_hooks or each._forward_pre_hooks:
            return False
    return True


def _known_parts(module: nn.Module) -> list[nn.Module]:
    if _is_known(module) or is_by_channel(module) or next(module.children(), None) is None:
        return [module]
    parts: list[nn.Module] = []
    for child in module.children():
        parts += _known_parts(child)
    return parts


def _keeps_channels(layer: nn.Module, dims: int) -> bool:
    """Whether a layer returns own channels in order. `dims`: the input's dimensions."""
    if any(_blocks_of(part) > 1 for part in _known_parts(layer)):
        return False
    modules = [*layer.modules()]
    if any(isinstance(each, (FunctionLayer, ParallelLinear)) for each in modules):
        # They may return all channels.
        return False
    # A pool finds the channels by the number of dimensions, which no module before it may change.
    kinds = [type(each).__name__ for each in modules if is_by_channel(each)]
    before = kinds[:-1] if is_by_channel(layer) else kinds
    if "Flatten" in before:
        return False
    pools = {int(kind[-2]) for kind in kinds if "Pool" in kind}
    if not pools:
        return True
    return pools == {dims - 3} and not any(isinstance(each, MeanOverSpace) for each in modules)


def _blocks_of(module: nn.Module) -> int:
    blocks = 1
    for each in module.modules():
        for shard in facts(each).shards.values():
            for axis, cut in shard.cuts:
                if axis == "tp" and cut.dim == 0:
                    blocks = cut.blocks
    return blocks


class ChannelWatch(TorchFunctionMode):
    """Watches a layer's dry run. `mixes`: user code did more than join tensors element by element."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.mixes = False
        self._in_function = False
        # TorchScript calls operators without torch's Python functions.
        self._operators = _UnseenOperators(self._note_operator)
        self._known: set[nn.Module] = set()
        for part in layer.modules():
            if is_by_channel(part):
                self._known.update(part.modules())
            elif class_name(part) in _CONTAINERS:
                self._known.add(part)

    def __enter__(self) -> Self:
        self._operators.__enter__()
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._operators.__exit__(*error)

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        options = kwargs or {}
        was_in_function = self._in_function
        self._in_function = True
        result = function(*args, **options)
        self._in_function = was_in_function
        frame = self._user_code(sys._getframe(1))
        if frame is not None:
            name = getattr(function, "__name__", "").strip("_")
            if name not in _ELEMENTWISE or _has_own_backward(frame):
                self.mixes = True
            shape = result.shape if isinstance(result, Tensor) else torch.Size()
            for x in (*args, *options.values()):
                # Another shape would be broadcast over channels.
                if isinstance(x, Tensor) and x.shape != shape and not _is_value_per_channel(x.shape, shape):
                    self.mixes = True
        return result

    def _note_operator(self, frame: FrameType | None) -> None:
        if not self._in_function and self._user_code(frame) is not None:
            self.mixes = True

    def _user_code(self, frame: FrameType | None) -> FrameType | None:
        """The user's calling code; None for MegaSNN's, or a module that works by channel."""
        while frame is not None:
            code = frame.f_globals.get("__name__", "")
            module = frame.f_locals.get("self")
            if code.startswith(_OURS):
                return None
            if isinstance(module, nn.Module):
                return None if module in self._known else frame
            if not code.startswith(_LIBRARIES):
                return frame
            frame = frame.f_back
        return frame


class _UnseenOperators(TorchDispatchMode):
    """Calls `note` with the code behind an operator."""

    def __init__(self, note: Callable[[FrameType | None], None]) -> None:
        super().__init__()
        self._note = note

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._note(sys._getframe(1))
        return func(*args, **(kwargs or {}))


def _has_own_backward(frame: FrameType | None) -> bool:
    # The backward of an autograd function may mix channels, and a dry run does not call it. Since torch 2.14 `apply`
    # itself has no frame, so the frames of the forwards are looked for.
    forwards = {getattr(each.forward, "__code__", None) for each in _autograd_functions(torch.autograd.Function)}
    while frame is not None and frame.f_code not in forwards:
        frame = frame.f_back
    return frame is not None


def _autograd_functions(base: type[Any]) -> Iterator[type[Any]]:
    for each in base.__subclasses__():
        yield each
        yield from _autograd_functions(each)


def _is_value_per_channel(shape: torch.Size, result: torch.Size) -> bool:
    """Whether `shape` is `[C, 1, ...]`, for a result `[N, C, ...]`."""
    return len(result) > 1 and shape == (result[1], *[1] * (len(result) - 2))


def cuts_by_shape(output: Bundle, whole_output: Bundle | None) -> list[bool]:
    """By output tensor, whether its shape differs from a single rank's. None: it is a single rank's."""
    local = entries_of(output)
    whole = entries_of(output if whole_output is None else whole_output)
    return [x.shape != y.shape for x, y in zip(local.values(), whole.values(), strict=True)]
