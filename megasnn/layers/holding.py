"""What tensors hold, found out by a dry run: layers run once on the meta device, where tensors have no values.

Neurons give spikes, 0 or 1. What is computed from spikes without leaving the whole numbers (a sum of two branches, a
product, max pooling, another view) has a largest value that is known: such tensors travel and are kept as bits or
bytes. Of everything else nothing is known, and it is dense. That the largest value is right is checked wherever a
tensor is packed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook
from torch.overrides import TorchFunctionMode

from megasnn.kernels.spike_codec import Content
from megasnn.layers.channels import cut_of, mark_cut

_OURS = "megasnn."  # classes from there hand gradients on
LARGEST_COUNT = 255  # what a byte holds

# By the names of torch's functions and methods: what gives some of the values of its inputs, and no others ...
_REARRANGE = {
    *("view", "reshape", "flatten", "unflatten", "permute", "transpose", "movedim", "t", "mT", "contiguous"),
    *("unsqueeze", "squeeze", "expand", "expand_as", "narrow", "select", "__getitem__", "chunk", "split", "unbind"),
    *(
        "stack",
        "cat",
        "concat",
        "flip",
        "roll",
        "repeat",
        "clone",
        "detach",
        "to",
        "float",
        "double",
        "type",
        "type_as",
    ),
    *("max_pool1d", "max_pool2d", "max_pool3d", "adaptive_max_pool2d", "amax", "relu", "index_select"),
}
# ... and what adds, multiplies, and takes from a number.
_ADD = {"add", "__add__", "__radd__", "__iadd__", "add_"}
_MULTIPLY = {"mul", "__mul__", "__rmul__", "__imul__", "mul_", "multiply", "logical_and"}
_SUBTRACT_FROM = {"rsub", "__rsub__"}
_RANDOM = {
    *("dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_alpha_dropout", "rrelu"),
    *("rand", "rand_like", "randn", "randn_like", "randint", "randint_like", "randperm", "bernoulli", "bernoulli_"),
    *("normal", "normal_", "uniform_", "exponential_", "poisson", "multinomial", "gumbel_softmax", "native_dropout"),
    *("random_", "log_normal_", "cauchy_", "geometric_", "scaled_dot_product_attention"),
}


def hold(tensor: Tensor, largest: int) -> Tensor:
    """Says of a tensor of the dry run that it holds whole numbers from 0 to `largest`; of others nothing."""
    if tensor.is_meta:
        tensor._largest = largest  # type: ignore[attr-defined]
    return tensor


def largest_of(value: Any) -> int | None:
    """The largest value that a tensor of the dry run, or a number, is known to hold; None where nothing is known."""
    if isinstance(value, Tensor):
        return getattr(value, "_largest", None)
    return int(value) if isinstance(value, (int, float)) and value >= 0 and value == int(value) else None


def content_of(tensor: Tensor) -> Content:
    """What a tensor of the dry run holds."""
    largest = 1 if tensor.dtype == torch.bool else largest_of(tensor)
    if largest is None or largest > LARGEST_COUNT:
        return Content.DENSE
    return Content.SPIKES if largest <= 1 else Content.COUNTS


def count_call(module: nn.Module) -> int:
    """To be called in the dry run of a layer whose gradients or statistics are counted: the number of this call."""
    vars(module)["_calls"] = number = vars(module).get("_calls", 0) + 1
    return number


def calls_of(module: nn.Module) -> int:
    """How often a forward of the model calls a layer, by the dry run, which may be never; once where there was none."""
    number: int = vars(module).get("_calls", 1)
    return number


def note_exchanges(module: nn.Module, forward: int = 1, backward: int = 1) -> None:
    """To be called in the dry run of a layer whose ranks tell each other something, with how often they do."""
    before = vars(module).get("_exchanges", (0, 0))
    vars(module)["_exchanges"] = before[0] + forward, before[1] + backward


def exchanges_of(modules: Iterable[nn.Module]) -> tuple[int, int]:
    """How often the ranks that share a micro-batch tell each other something in these and in all their parts, in a
    forward and in its backward; by the dry run."""
    every = {part: vars(part).get("_exchanges", (0, 0)) for module in modules for part in module.modules()}
    return sum(forward for forward, _ in every.values()), sum(backward for _, backward in every.values())


def say_input(x: Tensor) -> Tensor:
    """Says of a tensor of the dry run that it is the model's input, which has no gradient."""
    x._is_input = True  # type: ignore[attr-defined]
    return x


def is_input(x: Tensor) -> bool:
    return getattr(x, "_is_input", False)


def note_never_called(layer: nn.Module) -> None:
    """To be called behind the dry run of a layer: what was not called in it is not expected to be in training."""
    for module in layer.modules():
        vars(module).setdefault("_calls", 0)


def once(module: nn.Module, why: str) -> None:
    """To be called in the dry run of a layer that a forward may call once. Raises ValueError the second time."""
    if count_call(module) > 1:
        raise ValueError(f"this {type(module).__name__} is called twice in one forward, and {why}")


def joined(first: Content, second: Content) -> Content:
    """What holds everything that one of the two does."""
    return max(first, second, key=(Content.SPIKES, Content.COUNTS, Content.DENSE).index)


class Holding(TorchFunctionMode):
    """Inside, every result of a torch function says what it holds, as far as it follows from its arguments.

    Raises:
        ValueError: a function that draws random numbers, which would depend on the layout.
    """

    def __torch_function__(
        self,
        function: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        name = getattr(function, "__name__", "")
        if name in _RANDOM and _draws(name, args, kwargs or {}):
            raise ValueError(
                f"{name} draws random numbers that depend on the layout: use megasnn.ParallelDropout or DropPath"
            )
        result = function(*args, **(kwargs or {}))
        largest = _largest(name, args)
        for each in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(each, Tensor) and largest is not None:
                hold(each, largest)
        return result


def _draws(name: str, args: tuple[Any, ...], options: Mapping[str, Any]) -> bool:
    """Of dropout, whether it leaves anything out; functions without it always draw."""
    if name == "scaled_dot_product_attention":
        return bool(options.get("dropout_p", args[4] if len(args) > 4 else 0.0))
    if "dropout" not in name:
        return True
    p = options.get("p", args[1] if len(args) > 1 else 0.5)
    return bool(p) and bool(options.get("training", args[2] if len(args) > 2 else True))


def _largest(name: str, args: tuple[Any, ...]) -> int | None:
    if name in _REARRANGE:
        first = args[0] if args else None
        known = [largest_of(each) for each in (first if isinstance(first, (tuple, list)) else (first,))]
        return None if None in known else max(each for each in known if each is not None)
    if len(args) < 2:
        return None
    a, b = largest_of(args[0]), largest_of(args[1])
    if a is None or b is None:
        return None
    if name in _ADD:
        return a + b
    if name in _MULTIPLY:
        return a * b
    # 1 - x turns spikes into spikes, where x holds no more than them.
    return b if name in _SUBTRACT_FROM and args[1] == 1 and a <= 1 else None


@contextmanager
def showing_need_of_gradient() -> Iterator[None]:
    """Inside, tensors of a dry run need a gradient where those of a step would."""
    hook = register_module_forward_hook(_needing)
    try:
        with torch.enable_grad():
            yield
    finally:
        hook.remove()


def _needing(module: nn.Module, inputs: tuple[Any, ...], output: Any) -> Any:
    """The output of a layer of ours, which a gradient leads through; None for what tells by itself, and where someone
    else's class has a part in it, which may have cut it off."""
    if not isinstance(output, Tensor) or output.requires_grad or not output.is_floating_point():
        return None
    if not _is_from(module, _OURS) or not all(_is_from(each, _OURS, "torch.") for each in module.modules()):
        return None
    sources = [*module.parameters(), *(each for each in inputs if isinstance(each, Tensor))]
    # A product, since what is no leaf may be changed in place.
    return mark_cut(output.requires_grad_() * 1, cut_of(output)) if any(x.requires_grad for x in sources) else None


def _is_from(module: nn.Module, *packages: str) -> bool:
    return type(module).__module__.startswith(packages)
