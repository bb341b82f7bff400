"""How the kernels are compiled: no fast-math, no interpreter lock, machine code cached on disk."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from numba import njit

_OPTIONS: dict[str, Any] = {"nogil": True, "error_model": "numpy"}


def kernel(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function called from Python; its machine code is cached on disk where there is a place to write."""
    try:
        return njit(cache=True, **_OPTIONS)(function)
    except RuntimeError:  # numba found no such place
        return njit(**_OPTIONS)(function)


# A part of kernels, inlined into their machine code and therefore not cached or callable on its own.
_UNCALLED: dict[str, Any] = {"no_cpython_wrapper": True, "no_cfunc_wrapper": True}
part = njit(**_UNCALLED, **_OPTIONS)
