"""Compiling and running of loops: no fast-math, machine code cached on disk, threads that share the work."""

from __future__ import annotations

import contextlib
import hashlib
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import llvmlite.binding as llvm
import numba
import torch
from filelock import FileLock
from numba import njit
from numba.core.caching import FunctionCache, UserProvidedCacheLocator

from megasnn.common.files import MACHINE_CODE, CacheError, cache_folder

COMPILED: dict[str, Any] = {"nogil": True, "error_model": "numpy"}

# LLVM looks before a vectorised loop whether its arrays overlap, and gives up vectorising where that would take more
# than eight comparisons: too few for loops that read a handful of rows at once.
llvm.set_option("megasnn", "-runtime-memory-check-threshold=64")

# A part of kernels, inlined into their machine code and therefore not cached or callable on its own.
_UNCALLED: dict[str, Any] = {"no_cpython_wrapper": True, "no_cfunc_wrapper": True}
part = njit(**_UNCALLED, **COMPILED)


def kernel(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function called from Python; its machine code is cached on disk where there is a place to write."""
    compiled = njit(**COMPILED)(function)
    try:
        with _cached_in_own_folder():
            compiled._cache = MachineCode(function)
    except (CacheError, RuntimeError) as error:  # numba's error where it cannot write there
        warnings.warn(f"each process compiles the kernels anew: {error}", stacklevel=2)
    return compiled


class MachineCode(FunctionCache):
    """Numba's cache of a kernel's machine code, which processes may fill at a time."""

    _told = False

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        """Loads machine code; where there is none, says what a first start is waiting for."""
        found = super().load_overload(sig, target_context)
        if found is None:
            _tell()
        return found

    def save_overload(self, sig: Any, data: Any) -> None:
        """Saves machine code; on a full disk it is used and not saved.

        Of two that save at once, numba would give the code of two signatures one name.
        """
        with contextlib.suppress(OSError), FileLock(Path(self.cache_path) / ".saving.lock"):
            super().save_overload(sig, data)


def _tell() -> None:
    """Says once, on the first rank, that kernels are compiled."""
    if os.environ.get("RANK", "0") == "0" and not MachineCode._told:
        MachineCode._told = True
        sys.stderr.write("compiling kernels for this processor: half a minute to a minute, once for each kernel\n")


class FolderLocator(UserProvidedCacheLocator):
    """Place of machine code, which is out of date once any file beside the kernel's, or of this package, has changed.

    By itself numba looks at the kernel's own file alone, and not at those of the parts that it calls.
    """

    def get_source_stamp(self) -> str:
        folders = dict.fromkeys([Path(self._py_file).parent, Path(__file__).parent])
        digest = hashlib.sha256()
        for file in (file for folder in folders for file in sorted(folder.glob("*.py"))):
            digest.update(file.read_bytes())
        return digest.hexdigest()


@contextlib.contextmanager
def _cached_in_own_folder() -> Iterator[None]:
    """Lets numba find its cache in NUMBA_CACHE_DIR or else in the user's cache folder, and nowhere else.

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


_threads: dict[int, ThreadPoolExecutor] = {}
os.register_at_fork(after_in_child=_threads.clear)  # threads do not survive a fork


def run_kernel(kernel: Callable[..., None], slices: int, *args: Any) -> None:
    """Calls ``kernel(*args, first, last)`` so that ``range(units)`` is covered.

    As many threads take part as torch would use. Which one does a unit does not change any result.
    """
    threads = min(torch.get_num_threads(), slices)
    if threads <= 1:
        kernel(*args, 0, slices)
        return
    if threads - 1 not in _threads:
        _threads[threads - 1] = ThreadPoolExecutor(threads - 1, thread_name_prefix="megasnn-kernel")
    bounds = [slices * part // threads for part in range(threads + 1)]
    submit = _threads[threads - 1].submit
    others = [submit(kernel, *args, bounds[part], bounds[part + 1]) for part in range(1, threads)]
    kernel(*args, 0, bounds[1])
    for other in others:
        other.result()
