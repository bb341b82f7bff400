"""What mixes channels that tensor parallel ranks share out is refused: found in the dry run, by the function's name.

A layer of one's own may add, multiply, pool and fire; what joins, divides, sums or picks along the channels sees only
this rank's. The channels are the dimension that `channel_dim` says.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor

CHANNEL_DIM = {5: 2, 4: 1, 3: 2, 2: 1}  # of [T, N, C, H, W]; [T * N, C, H, W] or [N, C, H, W]; [T, N, C]; [N, C]

# Functions and methods with a dimension: its place among the arguments, and what it is by default.
_REDUCE = ("mean", "sum", "amax", "amin", "max", "min", "var", "std", "norm", "prod", "argmax", "any", "all")
_ALONG = {
    **{name: (1, None) for name in _REDUCE},
    **{name: (1, None) for name in ("softmax", "log_softmax", "cumsum", "cumprod", "sort", "flip", "unflatten")},
    **{name: (1, 0) for name in ("cat", "concat", "unbind", "narrow", "select", "index_select", "gather", "swapaxes")},
    **{name: (2, 0) for name in ("chunk", "split", "roll", "tensor_split")},
}
_all_channels = 0
_signal_steps: int | None = None


@contextmanager
def of_signals(time_steps: int | None) -> Iterator[None]:
    """Inside, activations are signals `[T, N, C, L]` with so many time steps, or `[T * N, C, L]`; None for frames."""
    global _signal_steps
    before, _signal_steps = _signal_steps, time_steps
    try:
        yield
    finally:
        _signal_steps = before


def channel_dim(tensor: Tensor) -> int | None:
    """The dimension of the channels of an activation; None where nothing is known of such a tensor."""
    if _signal_steps is not None and tensor.ndim == 4:
        return 2
    if _signal_steps is not None and tensor.ndim == 3 and len(tensor) not in (1, _signal_steps):
        return 1
    return CHANNEL_DIM.get(tensor.ndim)


def say_whole(tensor: Tensor, is_whole: bool = True) -> Tensor:
    """Says of a tensor of the dry run whether every rank has all channels of it; so is what is computed from it."""
    if tensor.is_meta:
        tensor._is_whole = is_whole  # type: ignore[attr-defined]
    return tensor


def is_said_whole(value: Any) -> bool:
    """Whether this is a tensor of the dry run that every rank has all channels of."""
    return isinstance(value, Tensor) and getattr(value, "_is_whole", False)


def refuse_whole(tensor: Tensor, size: int) -> None:
    """Raises ValueError for a tensor of the dry run that is said to be whole, where a rank's channels are wanted."""
    if size > 1 and is_said_whole(tensor):
        raise ValueError(
            f"the channels of the input {list(tensor.shape)} do not divide by --tensor-model-parallel-size {size}, and "
            "only a convolution or a linear layer takes them whole"
        )


@contextmanager
def all_channels() -> Iterator[None]:
    """Inside, tensors have all channels, or what is done to them is right for any number of ranks."""
    global _all_channels
    _all_channels += 1
    try:
        yield
    finally:
        _all_channels -= 1


def refuse_mixed_channels(name: str, args: tuple[Any, ...], options: Mapping[str, Any]) -> None:
    """Raises ValueError for a function that would give another result where a rank has some of the channels."""
    if _all_channels or name not in _ALONG and name != "__getitem__" or not args:
        return
    first = args[0][0] if isinstance(args[0], (tuple, list)) and args[0] else args[0]
    channel = channel_dim(first) if isinstance(first, Tensor) else None
    if channel is None:
        return
    if name == "__getitem__":
        mixes = _picks(args[1], channel)
    else:
        place, default = _ALONG[name]
        given = options.get("dim", options.get("dims", args[place] if len(args) > place else default))
        if isinstance(given, Tensor):  # the maximum of two tensors
            return
        dims = range(first.ndim) if given is None else given if isinstance(given, (tuple, list)) else (given,)
        mixes = any(isinstance(dim, int) and dim % first.ndim == channel for dim in dims)
    if mixes:
        raise ValueError(
            f"{name} along the channels (dimension {channel} of {list(first.shape)}): with "
            "--tensor-model-parallel-size above 1 a rank has its own channels only; set it to 1, or put what mixes "
            "channels into a plain module that is a layer by itself"
        )


def _picks(index: Any, channel: int) -> bool:
    parts = index if isinstance(index, tuple) else (index,)
    if any(part is Ellipsis or part is None for part in parts):
        return False
    return len(parts) > channel and parts[channel] != slice(None)
