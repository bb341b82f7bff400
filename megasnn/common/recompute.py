"""A first forward's batch-norm statistics and collectives, cached for the recomputed one."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any, TypeVar

from torch import Tensor

Result = TypeVar("Result")
Cache = deque[Any]
"""Results of `cached_collective` in a forward, in call order."""
_DIFFERS = (
    "a forward that is computed again did something else than the first time: let it depend on its input alone, or use "
    "--recompute never"
)


_forward: ContextVar[tuple[Cache, bool] | None] = ContextVar("forward", default=None)
"""The cache of the forward at work, and whether it is a replay."""


def cached_collective(compute: Callable[[], Result]) -> Result:
    """Computes, or in a recomputed forward returns the first one's result of the same call.

    Callers must not change a list of tensors. Raises ValueError for more calls than in the first forward.
    """
    forward = _forward.get()
    if forward is None:
        return compute()
    cache, is_replay = forward
    if not is_replay:
        result = compute()
        # A copy, since callers may change the tensor.
        cache.append(result.clone() if isinstance(result, Tensor) else result)
        return result
    if not cache:
        raise ValueError(_DIFFERS)
    cached: Result = cache.popleft()
    return cached


def is_replaying() -> bool:
    forward = _forward.get()
    return forward is not None and forward[1]


class recording_collectives:
    """Fills `cache` in a first forward."""

    def __init__(self, cache: Cache) -> None:
        self._forward = cache, False

    def __enter__(self) -> None:
        self._token = _forward.set(self._forward)

    def __exit__(self, *error: object) -> None:
        _forward.reset(self._token)


class replaying_collectives:
    """Consumes `cache` in the recomputed forward. Raises ValueError if results remain."""

    def __init__(self, cache: Cache) -> None:
        self._forward = cache, True

    def __enter__(self) -> None:
        self._token = _forward.set(self._forward)

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        _forward.reset(self._token)
        if kind is None and self._forward[0]:
            raise ValueError(_DIFFERS)
