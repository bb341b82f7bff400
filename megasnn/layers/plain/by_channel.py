"""Layers that a tensor parallel rank computes with its own channels; all others are whole on every rank.

MegaSNN's layers exchange what they need of other channels. Code of the user's between them does not: it may only join
tensors element by element, which the dry run of a layer watches. Whatever else it does, the layer is whole, which is
right for everything and costs more.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import FrameType
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from megasnn.common.bundle import Bundle, entries_of
from megasnn.layers.blocks import ConvNormNeuron
from megasnn.layers.conv import ParallelConv
from megasnn.layers.layer import FunctionLayer
from megasnn.layers.linear import MeanLinear, ParallelLinear
from megasnn.layers.plain.refusals import is_by_channel
from megasnn.layers.plain.table import class_name
from megasnn.layers.row_context import MeanOverSpace
from megasnn.parallel.sharding import shards_of

# By the names of torch's functions and methods, without underscores: what works element by element.
_ELEMENTWISE = {
    *("add", "radd", "iadd", "sub", "rsub", "isub", "mul", "rmul", "imul", "div", "truediv", "rtruediv", "itruediv"),
    *("neg", "pow", "abs", "exp", "log", "sqrt", "square", "sigmoid", "tanh", "relu", "gelu", "silu", "softplus"),
    *("clamp", "round", "floor", "ceil", "sign", "maximum", "minimum", "where", "gt", "ge", "lt", "le", "logical_and"),
    *("detach", "clone", "to", "float", "double", "zeros_like", "ones_like"),
}
_CONTAINERS = {"SeqToANNContainer", "MultiStepContainer"}  # of SpikingJelly, which only move time
_OURS, _LIBRARIES = "megasnn.", ("torch.", "spikingjelly.", "einops.")


def may_be_cut(layer: nn.Module, inputs: Sequence[Bundle], cuts: Sequence[bool], is_first: bool) -> bool:
    """Tells whether a rank may compute a layer with its channels, as far as modules tell; code is watched.

    Args:
        inputs: what it takes, on the meta device. cuts: for each of its tensors, whether ranks have their own channels.
        is_first: it takes the model's input alone, which every rank has whole.
    """
    dims = {x.ndim for each in inputs for x in entries_of(each).values()}
    if not _is_known(layer):
        return all(cuts) and _fits(layer, max(dims))
    is_linear = isinstance(layer, ParallelLinear) and not isinstance(layer, MeanLinear)
    if _blocks_of(layer) > 1 or (is_linear and dims != {3}):
        return False
    begins = isinstance(layer, (ConvNormNeuron, ParallelConv)) or type(layer).__module__.startswith("megasnn.models.")
    return all(cuts) or (is_first and begins)


def _is_known(layer: nn.Module) -> bool:
    """Tells whether the forward of a module is MegaSNN's, and of all in it."""
    return all(
        getattr(each.forward, "func", each.forward).__module__.startswith(_OURS) and not isinstance(each, FunctionLayer)
        for each in layer.modules()
    )


def is_of_libraries(layer: nn.Module) -> bool:
    """Tells whether all code in a layer is of MegaSNN, torch.nn and SpikingJelly, hooks included."""
    for each in layer.modules():
        code = (type(each).__module__, getattr(each.forward, "func", each.forward).__module__)
        if not all(f"{name}.".startswith((_OURS, "torch.nn.", "spikingjelly.")) for name in code):
            return False
        if isinstance(each, FunctionLayer) or each._forward_hooks or each._forward_pre_hooks:
            return False
    return True


def _parts(module: nn.Module) -> Iterable[nn.Module]:
    """The modules in one, down to those that are known."""
    if _is_known(module) or is_by_channel(module) or next(module.children(), None) is None:
        return [module]
    return [part for child in module.children() for part in _parts(child)]


def _fits(layer: nn.Module, dims: int) -> bool:
    """Tells whether the modules in a layer give a rank's channels, in their order, for those of a tensor of so many
    dimensions."""
    if any(_blocks_of(part) > 1 for part in _parts(layer)):
        return False
    if any(isinstance(each, (FunctionLayer, ParallelLinear)) for each in layer.modules()):  # which may give it whole
        return False
    # Pools find the channels by the number of dimensions, which no module in front of them may change.
    kinds = [type(each).__name__ for each in layer.modules() if is_by_channel(each)]
    pools = {int(kind[-2]) for kind in kinds if "Pool" in kind}
    if "Flatten" in (kinds[:-1] if is_by_channel(layer) else kinds):
        return False
    return pools <= {dims - 3} and not (pools and any(isinstance(each, MeanOverSpace) for each in layer.modules()))


def _blocks_of(module: nn.Module) -> int:
    """Number of blocks that the output channels of a module of ours consist of, as its last part says."""
    shards = [shard for each in module.modules() for shard in shards_of(each).values()]
    said = [cut.blocks for shard in shards for axis, cut in shard.cuts if axis == "tp" and cut.dim == 0]
    return [1, *said][-1]


class ChannelWatch(TorchFunctionMode):
    """Watches the dry run of a layer for code, not MegaSNN's, that does more than joining tensors element by element.

    Attributes:
        mixes: whether there was some.
    """

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.mixes = False
        self._in_function, self._operators = False, _UnseenOperators(self._note_operator)
        by_channel = [each for part in layer.modules() if is_by_channel(part) for each in part.modules()]
        self._known = {*by_channel, *(each for each in layer.modules() if class_name(each) in _CONTAINERS)}

    def __enter__(self) -> Self:
        self._operators.__enter__()
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._operators.__exit__(*error)

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        was_in_function, self._in_function = self._in_function, True
        result = function(*args, **(kwargs or {}))
        self._in_function = was_in_function
        frame = self._own_code(sys._getframe(1))
        if frame is not None:
            tensors = [x for x in (*args, *(kwargs or {}).values()) if isinstance(x, Tensor)]
            shape = result.shape if isinstance(result, Tensor) else torch.Size()
            is_known = getattr(function, "__name__", "").strip("_") in _ELEMENTWISE and not _has_own_backward(frame)
            self.mixes |= not is_known or not all(_meets(x.shape, shape) for x in tensors)
        return result

    def _note_operator(self, frame: FrameType | None) -> None:
        self.mixes |= not self._in_function and self._own_code(frame) is not None

    def _own_code(self, frame: FrameType | None) -> FrameType | None:
        """The user's code that calls a function; None where MegaSNN's does, or a module that is known to work by
        channel."""
        while frame is not None:
            code, module = frame.f_globals.get("__name__", ""), frame.f_locals.get("self")
            if code.startswith(_OURS):
                return None
            if isinstance(module, nn.Module):
                return None if module in self._known else frame
            if not code.startswith(_LIBRARIES):
                return frame
            frame = frame.f_back
        return frame


class _UnseenOperators(TorchDispatchMode):
    """Calls `note` with the code that begins an operator: TorchScript calls operators without torch's functions."""

    def __init__(self, note: Callable[[FrameType | None], None]) -> None:
        super().__init__()
        self._note = note

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._note(sys._getframe(1))
        return func(*args, **(kwargs or {}))


def _has_own_backward(frame: FrameType | None) -> bool:
    """Whether code runs in the forward of an autograd function, whose backward may mix channels."""
    # Since torch 2.14 `apply` itself has no frame, so the forwards are looked for.
    forwards = {getattr(each.forward, "__code__", None) for each in _autograd_functions(torch.autograd.Function)}
    while frame is not None and frame.f_code not in forwards:
        frame = frame.f_back
    return frame is not None


def _autograd_functions(base: type[Any]) -> Iterator[type[Any]]:
    for each in base.__subclasses__():
        yield each
        yield from _autograd_functions(each)


def _meets(shape: torch.Size, result: torch.Size) -> bool:
    """Tells whether a tensor meets another element by element: by its shape, or as a value for each channel of neurons
    `[N, C, ...]`, `[C, 1, ...]`."""
    return shape == result or len(result) > 1 and shape == (result[1], *[1] * (len(result) - 2))


def cuts_by_shape(output: Bundle, one: Bundle | None) -> list[bool]:
    """Tells of each tensor of an output if ranks cut it by channel, by the shapes that one rank's has, if it is not
    that itself."""
    pairs = zip(entries_of(output).values(), entries_of(output if one is None else one).values(), strict=True)
    return [local.shape != whole.shape for local, whole in pairs]
