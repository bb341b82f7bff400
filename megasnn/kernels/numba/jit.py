"""How the kernels are compiled: no fast-math, no interpreter lock, machine code cached on disk."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import llvmlite.binding as llvm
import numba
from numba import njit
from numba.core.caching import UserProvidedCacheLocator

from megasnn.cache import MACHINE_CODE, CacheError, cache_folder

COMPILED: dict[str, Any] = {"nogil": True, "error_model": "numpy"}

# LLVM looks before a vectorised loop whether its arrays overlap, and gives up vectorising where that would take more
# than eight comparisons: too few for loops that read a handful of rows at once.
llvm.set_option("megasnn", "-runtime-memory-check-threshold=64")


class FolderLocator(UserProvidedCacheLocator):
    """Where numba keeps machine code, which is out of date once any file beside the kernel's, or of this package, has
    changed.

    By itself numba looks at the kernel's own file alone, and not at those of the parts that it calls.
    """

    def get_source_stamp(self) -> str:
        digest = hashlib.sha256()
        for file in sorted(Path(self._py_file).parent.glob("*.py")):
            digest.update(file.read_bytes())
        digest.update(_digest_of_package())
        return digest.hexdigest()


@functools.cache
def _digest_of_package() -> bytes:
    digest = hashlib.sha256()
    for file in sorted(Path(__file__).parent.rglob("*.py")):
        digest.update(file.read_bytes())
    return digest.digest()


def kernel(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function called from Python; its machine code is cached on disk where there is a place to write."""
    try:
        with _cached_in_own_folder():
            return njit(cache=True, **COMPILED)(function)
    except (CacheError, RuntimeError) as error:  # numba's error where it cannot write there
        warnings.warn(f"each process compiles the kernels anew: {error}", stacklevel=2)
        return njit(**COMPILED)(function)


@contextlib.contextmanager
def _cached_in_own_folder() -> Iterator[None]:
    """In it numba finds its cache in NUMBA_CACHE_DIR or else in the user's cache folder, and nowhere else.

    What numba finds there it runs (and reads with pickle). By itself it would also look beside the source, where others
    may be able to write.
    """
    config: Any = numba.config
    before = config.CACHE_DIR, config.CACHE_LOCATOR_CLASSES
    config.CACHE_DIR = before[0] or str(cache_folder(MACHINE_CODE))
    config.CACHE_LOCATOR_CLASSES = f"{FolderLocator.__module__}.{FolderLocator.__qualname__}"
    try:
        yield
    finally:
        config.CACHE_DIR, config.CACHE_LOCATOR_CLASSES = before


# A part of kernels, inlined into their machine code and therefore not cached or callable on its own.
_UNCALLED: dict[str, Any] = {"no_cpython_wrapper": True, "no_cfunc_wrapper": True}
part = njit(**_UNCALLED, **COMPILED)
