"""Running a compiled kernel: one process compiles while the others wait, and threads share the work."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
from filelock import FileLock

from megasnn.cache import CacheError, cache_folder

ANNOUNCED_AFTER_S = 3.0
COMPILED_AFTER_S = 600.0

_compiled: set[tuple[Any, ...]] = set()
_announced = threading.Event()
_threads: dict[int, ThreadPoolExecutor] = {}
os.register_at_fork(after_in_child=_threads.clear)  # threads do not survive a fork


def run(kernel: Callable[..., None], units: int, first_array: Any, *args: Any) -> None:
    """Calls ``kernel(first_array, *args, first, last)`` so that ``range(units)`` is covered.

    As many threads take part as torch would use. Which one does a unit does not change any result.
    """
    # A kernel is compiled anew for arrays of other types, and the first array may be of the same one in all of them.
    key = (kernel, first_array.dtype, *[each.dtype for each in args if isinstance(each, np.ndarray)])
    if key not in _compiled:
        with _announced_when_slow(), _one_process(kernel):
            try:
                kernel(first_array, *args, 0, units)
            except OSError:  # it is compiled, and only its machine code could not be stored: a full disk
                kernel(first_array, *args, 0, units)
        _compiled.add(key)
        return
    threads = min(torch.get_num_threads(), units)
    if threads == 1:
        kernel(first_array, *args, 0, units)
        return
    bounds = [units * part // threads for part in range(threads + 1)]
    pool = _pool(threads - 1)
    others = [pool.submit(kernel, first_array, *args, bounds[part], bounds[part + 1]) for part in range(1, threads)]
    kernel(first_array, *args, 0, bounds[1])
    for other in others:
        other.result()


def _pool(workers: int) -> ThreadPoolExecutor:
    if workers not in _threads:
        _threads[workers] = ThreadPoolExecutor(workers, thread_name_prefix="megasnn-kernel")
    return _threads[workers]


@contextlib.contextmanager
def _announced_when_slow() -> Iterator[None]:
    """Says, once and on the first rank, what a first start is waiting for."""
    timer = threading.Timer(ANNOUNCED_AFTER_S, _announce)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _announce() -> None:
    if os.environ.get("RANK", "0") == "0" and not _announced.is_set():
        _announced.set()
        sys.stderr.write(
            "compiling the fused kernels for this processor: half a minute to a minute, the first time only\n"
        )


@contextlib.contextmanager
def _one_process(kernel: Callable[..., None]) -> Iterator[None]:
    """Held by one process of this user at a time: the ranks that come second find the machine code in the cache.

    Where the cache cannot be written, or another process has been compiling for minutes, each compiles for itself.
    """
    with contextlib.ExitStack() as stack:
        stats = getattr(kernel, "stats", None)
        if stats is None or stats.cache_path is not None:  # otherwise `jit` found no place for its machine code
            with contextlib.suppress(CacheError, OSError):
                lock = FileLock(cache_folder() / ".compile.lock", timeout=COMPILED_AFTER_S)
                stack.enter_context(lock)
        yield
