"""Cache of batch-norm statistics and collectives of a first forward for the recomputed one.

A layer asks for them by `cached_collective`; whoever runs the forwards records the first and replays it in the second.
Anywhere else `cached_collective` only computes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple, TypeVar

from torch import Tensor

Result = TypeVar("Result")
Cache = deque[Any]
"""Results of `cached_collective` in a forward, in the order of the calls."""


class _Forward(NamedTuple):
    cache: Cache
    is_replay: bool


_forward: ContextVar[_Forward | None] = ContextVar("forward", default=None)


def cached_collective(compute: Callable[[], Result]) -> Result:
    """Computes, or in a recomputed forward gives what was computed at the same place in the first one.

    A tensor is kept as a copy, since whoever is given it may change it; a list of tensors is not to be changed.

    Raises:
        ValueError: a recomputed forward that comes here more often than the first one did.
    """
    forward = _forward.get()
    if forward is None:
        return compute()
    if not forward.is_replay:
        result = compute()
        forward.cache.append(result.clone() if isinstance(result, Tensor) else result)
        return result
    if not forward.cache:
        raise ValueError(_DIFFERS)
    kept: Result = forward.cache.popleft()
    return kept


def is_replaying() -> bool:
    """Tells whether this is a recomputed forward, in which `cached_collective` computes nothing."""
    forward = _forward.get()
    return forward is not None and forward.is_replay


@contextmanager
def recording(cache: Cache) -> Iterator[None]:
    """Around a forward that is recomputed later; its results are added to `cache`."""
    token = _forward.set(_Forward(cache, is_replay=False))
    try:
        yield
    finally:
        _forward.reset(token)


@contextmanager
def replaying(cache: Cache) -> Iterator[None]:
    """Around the recomputed forward, which takes all of `cache`. Raises ValueError where it leaves some."""
    token = _forward.set(_Forward(cache, is_replay=True))
    try:
        yield
    finally:
        _forward.reset(token)
    if cache:
        raise ValueError(_DIFFERS)


_DIFFERS = (
    "a forward that is computed again did something else than the first time: let it depend on its input alone, or use "
    "--recompute never"
)
