"""Compiles and runs loops: machine code cached on disk, work shared by threads."""

from __future__ import annotations

import contextlib
import hashlib
import os
import sys
import time
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

# Without fast-math: forward does the operations of `torch_backend` in their order, and no spike may flip.
COMPILED: dict[str, Any] = {"nogil": True, "error_model": "numpy"}

# Before a vectorised loop LLVM compares its arrays for overlap. Where that takes more than eight comparisons LLVM does
# not vectorise at all, and loops that read a handful of rows at once need more.
llvm.set_option("megasnn", "-runtime-memory-check-threshold=64")

# A part is compiled into the machine code of kernels: it is neither cached nor callable on its own.
_UNCALLED: dict[str, Any] = {"no_cpython_wrapper": True, "no_cfunc_wrapper": True}
part = njit(**_UNCALLED, **COMPILED)

_threads: dict[int, ThreadPoolExecutor] = {}  # helpers besides the calling thread, by their number
# Threads do not survive a fork.
os.register_at_fork(after_in_child=_threads.clear)


def kernel(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compiles a function that Python calls; caches machine code on disk where the folder is writable."""
    compiled = njit(**COMPILED)(function)
    try:
        with _cached_in_own_folder():
            compiled._cache = MachineCode(function)
    except (CacheError, RuntimeError) as error:
        # numba raises RuntimeError for a folder that is not writable.
        warnings.warn(f"each process compiles the kernels anew: {error}", stacklevel=2)
    return compiled


class MachineCode(FunctionCache):
    """Numba's machine code cache: the processes of a host compile each kernel once, and share it.

    A process that misses a kernel waits while another one compiles it.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__(function)
        self._compiling: FileLock | None = None

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        found = super().load_overload(sig, target_context)
        if found is not None:
            return found
        progress.report()
        # An earlier kernel that did not compile.
        self._finish()
        # The system releases the lock of a process that ends. The key holds the processor as well: hosts with a common
        # folder and other processors do not wait for each other.
        key = repr(self._index_key(sig, target_context.codegen()))
        name = f".{self._py_func.__name__}-{hashlib.sha256(key.encode()).hexdigest()[:16]}.lock"
        # Without locks on this file system each process compiles, as without a cache.
        with contextlib.suppress(OSError, NotImplementedError):
            self._impl.locator.ensure_cache_path()
            lock = FileLock(Path(self.cache_path) / name)
            lock.acquire()
            self._compiling = lock
            found = super().load_overload(sig, target_context)
        if found is not None:
            self._finish()
        return found

    def save_overload(self, sig: Any, data: Any) -> None:
        """On a full disk, machine code is used without being saved."""
        progress.compiled += 1
        # Without the lock two processes that save at once give the code of two signatures the same file name.
        with contextlib.suppress(OSError), FileLock(Path(self.cache_path) / ".saving.lock"):
            super().save_overload(sig, data)
        self._finish()

    def _finish(self) -> None:
        if self._compiling is not None:
            self._compiling.release()
            self._compiling = None


class Progress:
    """A line on the first rank for each kernel that is not in the cache.

    Attributes:
        compiled: kernels that this process has compiled.
        position, total: kernel at hand, and kernels to come, where `compile_ahead` knows them; otherwise 0.
    """

    def __init__(self) -> None:
        self.compiled = 0
        self.position = 0
        self.total = 0
        self._began: float | None = None

    def report(self) -> None:
        if os.environ.get("RANK", "0") != "0":
            return
        if self._began is None:
            self._began = time.monotonic()
        count = f"kernel {self.position} of {self.total}" if self.total else "one more kernel"
        seconds = time.monotonic() - self._began
        sys.stderr.write(f"compiling for this processor, once a host: {count}, {seconds:.0f} s so far\n")


progress = Progress()


class FolderLocator(UserProvidedCacheLocator):
    """Cache folder, outdated once a file beside the kernel's, or in this package, changes."""

    def get_cache_path(self) -> str:
        # numba unpickles a cache's index before it compares the stamp. An index of a release whose modules had other
        # names would end in a ModuleNotFoundError, so that each set of modules has a folder of its own.
        names = " ".join(sorted(file.name for file in Path(__file__).parent.glob("*.py")))
        return str(Path(super().get_cache_path(), hashlib.sha256(names.encode()).hexdigest()[:8]))

    def get_source_stamp(self) -> str:
        # numba itself watches only the kernel's own file, and not the files of the parts that the kernel calls
        # (findings/numba_cache_of_callers.sh).
        folders = dict.fromkeys([Path(self._py_file).parent, Path(__file__).parent])
        digest = hashlib.sha256()
        for folder in folders:
            for file in sorted(folder.glob("*.py")):
                digest.update(file.read_bytes())
        return digest.hexdigest()


@contextlib.contextmanager
def _cached_in_own_folder() -> Iterator[None]:
    """Lets numba cache in NUMBA_CACHE_DIR, or else in the user's cache folder, and nowhere else."""
    # numba unpickles and runs the files of its cache. Its default is a folder beside the source, where other users may
    # be able to write.
    config: Any = numba.config
    folder = config.CACHE_DIR
    locators = config.CACHE_LOCATOR_CLASSES
    config.CACHE_DIR = folder or str(cache_folder(MACHINE_CODE))
    config.CACHE_LOCATOR_CLASSES = f"{FolderLocator.__module__}.{FolderLocator.__qualname__}"
    try:
        yield
    finally:
        config.CACHE_DIR = folder
        config.CACHE_LOCATOR_CLASSES = locators


def run_kernel(kernel: Callable[..., None], slices: int, *args: Any) -> None:
    """Calls ``kernel(*args, first, last)`` on parts of ``range(slices)``, in torch's number of threads.

    Results do not depend on that number.
    """
    threads = min(torch.get_num_threads(), slices)
    if threads <= 1:
        kernel(*args, 0, slices)
        return
    if threads - 1 not in _threads:
        _threads[threads - 1] = ThreadPoolExecutor(threads - 1, thread_name_prefix="megasnn-kernel")
    bounds = [slices * part // threads for part in range(threads + 1)]
    submit = _threads[threads - 1].submit
    # This thread does the first part itself.
    others = [submit(kernel, *args, bounds[part], bounds[part + 1]) for part in range(1, threads)]
    kernel(*args, 0, bounds[1])
    for other in others:
        other.result()
