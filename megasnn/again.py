"""Forwards that are computed again for their backward: what the first one found is kept, where the second one is not to
find it by itself.

The statistics of a norm and all that ranks exchange are of that kind. A layer asks for them by `once`; whoever runs the
forwards says which one is the first and which the second. Anywhere else `once` only computes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple, TypeVar

from torch import Tensor

Found = TypeVar("Found")
Findings = deque[Any]
"""What `once` gave in a forward, in the order of the calls."""


class _Forward(NamedTuple):
    findings: Findings
    is_second: bool


_forward: ContextVar[_Forward | None] = ContextVar("forward", default=None)


def once(compute: Callable[[], Found]) -> Found:
    """What `compute` gives; in a second forward, what it gave at the same place in the first one.

    A tensor is kept as a copy, since whoever is given it may change it; a list of tensors is not to be changed.

    Raises:
        ValueError: in a second forward that comes here more often than the first one did.
    """
    forward = _forward.get()
    if forward is None:
        return compute()
    if not forward.is_second:
        found = compute()
        forward.findings.append(found.clone() if isinstance(found, Tensor) else found)
        return found
    if not forward.findings:
        raise ValueError(_DIFFERS)
    kept: Found = forward.findings.popleft()
    return kept


def is_again() -> bool:
    """Whether this is a second forward, in which `once` computes nothing."""
    forward = _forward.get()
    return forward is not None and forward.is_second


@contextmanager
def first_forward(findings: Findings) -> Iterator[None]:
    """Inside is a forward that is computed again later; what it finds is added to `findings`."""
    token = _forward.set(_Forward(findings, is_second=False))
    try:
        yield
    finally:
        _forward.reset(token)


@contextmanager
def second_forward(findings: Findings) -> Iterator[None]:
    """Inside is the same forward again, which takes all of `findings`. Raises ValueError where it leaves some."""
    token = _forward.set(_Forward(findings, is_second=True))
    try:
        yield
    finally:
        _forward.reset(token)
    if findings:
        raise ValueError(_DIFFERS)


_DIFFERS = (
    "a forward that is computed again did something else than the first time: let it depend on its input alone, or use "
    "--recompute never"
)
