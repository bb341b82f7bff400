"""A first forward's batch-norm statistics and collectives, cached for the recomputed one."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple, TypeVar

from torch import Tensor

Result = TypeVar("Result")
Cache = deque[Any]
"""Results of `cached_collective` in a forward, in call order."""
_DIFFERS = (
    "a forward that is computed again did something else than the first time: let it depend on its input alone, or use "
    "--recompute never"
)


class _Forward(NamedTuple):
    cache: Cache
    is_replay: bool


_forward: ContextVar[_Forward | None] = ContextVar("forward", default=None)


def cached_collective(compute: Callable[[], Result]) -> Result:
    """Computes, or in a recomputed forward returns the first one's result of the same call.

    Callers must not change a list of tensors. Raises ValueError for more calls than in the first forward.
    """
    forward = _forward.get()
    if forward is None:
        return compute()
    if not forward.is_replay:
        result = compute()
        # A copy, since callers may change the tensor.
        forward.cache.append(result.clone() if isinstance(result, Tensor) else result)
        return result
    if not forward.cache:
        raise ValueError(_DIFFERS)
    cached: Result = forward.cache.popleft()
    return cached


def is_replaying() -> bool:
    forward = _forward.get()
    return forward is not None and forward.is_replay


@contextmanager
def recording(cache: Cache) -> Iterator[None]:
    """Fills `cache` in a first forward."""
    token = _forward.set(_Forward(cache, is_replay=False))
    try:
        yield
    finally:
        _forward.reset(token)


@contextmanager
def replaying(cache: Cache) -> Iterator[None]:
    """Consumes `cache` in the recomputed forward. Raises ValueError if results remain."""
    token = _forward.set(_Forward(cache, is_replay=True))
    try:
        yield
    finally:
        _forward.reset(token)
    if cache:
        raise ValueError(_DIFFERS)
