"""How the kernels are compiled: no fast-math, no interpreter lock, machine code cached on disk."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numba
from numba import njit

from megasnn.cache import CacheError, cache_folder
from megasnn.cache.room import MACHINE_CODE

_OPTIONS: dict[str, Any] = {"nogil": True, "error_model": "numpy"}


def kernel(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function called from Python; its machine code is cached on disk where there is a place to write."""
    try:
        with _cached_in_own_folder():
            return njit(cache=True, **_OPTIONS)(function)
    except (CacheError, RuntimeError) as error:  # numba's error where it cannot write there
        warnings.warn(f"each process compiles the kernels anew: {error}", stacklevel=2)
        return njit(**_OPTIONS)(function)


@contextlib.contextmanager
def _cached_in_own_folder() -> Iterator[None]:
    """In it numba finds its cache in NUMBA_CACHE_DIR or else in the user's cache folder, and nowhere else.

    What numba finds there it runs (and reads with pickle). By itself it would also look beside the source, where others
    may be able to write.
    """
    config: Any = numba.config
    before = config.CACHE_DIR, config.CACHE_LOCATOR_CLASSES
    config.CACHE_DIR = before[0] or str(cache_folder(MACHINE_CODE))
    config.CACHE_LOCATOR_CLASSES = "UserProvidedCacheLocator"
    try:
        yield
    finally:
        config.CACHE_DIR, config.CACHE_LOCATOR_CLASSES = before


# A part of kernels, inlined into their machine code and therefore not cached or callable on its own.
_UNCALLED: dict[str, Any] = {"no_cpython_wrapper": True, "no_cfunc_wrapper": True}
part = njit(**_UNCALLED, **_OPTIONS)
