"""Marks on tensors of the dry run: in which dimension tensor-parallel ranks cut them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

from torch import Tensor

_untracked = 0


class Cut(NamedTuple):
    """The dimension that is cut; it consists of so many equal blocks, and each is cut by itself."""

    dim: int
    blocks: int = 1


UNMARKED = Cut(-2)


class MixedChannels(ValueError):
    """A forward that would compute something else where a rank has some of the channels.

    Attributes:
        path: of the module in the layer whose forward it is; "" for the layer; None where it is not known.
    """

    def __init__(self, message: str, path: str | None = None) -> None:
        super().__init__(message)
        self.path = path


def mark_cut(tensor: Tensor, cut: Cut | None) -> Tensor:
    """Marks a tensor of the dry run as cut, or as replicated (None)."""
    if tensor.is_meta:
        tensor._cut = cut  # type: ignore[attr-defined]
    return tensor


def mark_replicated(tensor: Tensor) -> Tensor:
    """Marks a tensor of the dry run as one that every rank has whole."""
    return mark_cut(tensor, None)


def cut_of(tensor: Tensor) -> Cut | None:
    """The mark of a tensor of the dry run; UNMARKED where there is none."""
    found: Cut | None = getattr(tensor, "_cut", UNMARKED)
    return found


def is_replicated(tensor: object) -> bool:
    """Tells whether a tensor of the dry run is marked as one that every rank has whole."""
    return isinstance(tensor, Tensor) and cut_of(tensor) is None


@contextmanager
def untracked() -> Iterator[None]:
    """Inside, what is done to tensors is right for any number of ranks: results are marked, and not followed."""
    global _untracked
    _untracked += 1
    try:
        yield
    finally:
        _untracked -= 1


def is_tracked() -> bool:
    """Tells whether functions of torch are followed here."""
    return not _untracked
