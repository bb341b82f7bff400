"""What the graphs of a chunk have in common: how they are made, and in which memory they find and leave things."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megasnn.kernels.spike_codec import bits_of, remember_bits
from megasnn.layers.weight_grad import WeightGradients
from megasnn.pipeline.capture import Capture


class CaptureError(RuntimeError):
    """A layer's kernels could not be taken down; the message says which, and why."""


class MicroBatchPass(NamedTuple):
    """A micro-batch that goes through the layers of a chunk, forward and backward.

    Attributes:
        slot: in which it is: only one at a time is in each.
        pool: for the graphs that are made in this pass, but those of weight gradients. Whichever of them are replayed
            in later passes, their order is the one in which they were made: forward the layers come one after another,
            and backward in the opposite order, as autograd goes.
        may_make: whether graphs may be made now; to be asked before one is.
        fail: called with the name of a layer whose backward cannot be captured; raises where that is not allowed.
    """

    slot: int
    pool: Any
    may_make: Callable[[], bool]
    fail: Callable[[str, CaptureError], None]


class GraphRoom:
    """How graphs are made, and which memory they have left something in.

    Where a layer is left out, all others get graphs in a new room. What was forwarded before goes backward in its own.

    Attributes:
        of_weights: the pool for graphs of weight gradients. They keep nothing there, so that their order is free.
        weight_gradients: where layers leave the second part of their backward.
        left_out: the names of layers for which nothing is captured any more.
        anchor: makes what a graph gives part of autograd's graph.
    """

    def __init__(self, capture: Capture, weight_gradients: WeightGradients, left_out: Collection[str]) -> None:
        self.capture, self.weight_gradients, self.left_out = capture, weight_gradients, left_out
        self.anchor, self.of_weights = torch.zeros((), requires_grad=True), capture.pool()
        self._fixed: set[int] = set()

    def is_fixed(self, x: Tensor) -> bool:
        """Whether it is where a graph has left it."""
        return x.untyped_storage().data_ptr() in self._fixed

    def fix(self, x: Tensor) -> None:
        """From now on this memory is where a graph leaves it; the graph holds it."""
        self._fixed.add(x.untyped_storage().data_ptr())

    def places(self, tensors: Sequence[Tensor | None]) -> tuple[Any, ...]:
        """What a graph has to know of where tensors are."""
        return tuple(None if x is None else (x.stride(), x.data_ptr() if self.is_fixed(x) else 0) for x in tensors)


@contextmanager
def making(what: str) -> Iterator[None]:
    """Raises CaptureError for whatever goes wrong inside."""
    try:
        yield
    except Exception as error:
        reason = (str(error).splitlines() or [""])[0]  # torch goes on for lines about all of CUDA's errors
        raise CaptureError(f"{what} cannot be captured ({type(error).__name__}: {reason})") from error


class Places:
    """Where a graph finds what it is given.

    Attributes:
        tensors: there. are_copied: which of them are filled before each replay; the others come from other graphs.
    """

    def __init__(self, room: GraphRoom, given: Sequence[Tensor]) -> None:
        self.are_copied = [not room.is_fixed(x) for x in given]
        self.tensors = []
        for x, is_copied in zip(given, self.are_copied, strict=True):
            if is_copied:  # in the same memory order, also where values are repeated
                place = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device)
            else:
                place = remember_bits(x.detach(), bits_of(x))
            self.tensors.append(place.requires_grad_(x.requires_grad))

    def fill(self, given: Sequence[Tensor]) -> None:
        with torch.no_grad():
            for place, x, is_copied in zip(self.tensors, given, self.are_copied, strict=True):
                if is_copied:
                    _distinct(place).copy_(_distinct(x))


def _distinct(x: Tensor) -> Tensor:
    """Each place in memory once, of a tensor that may be expanded; autograd does not see when it is written to."""
    once = [1 if stride == 0 else size for size, stride in zip(x.shape, x.stride(), strict=True)]
    return x.data.as_strided(once, x.stride(), x.storage_offset())
