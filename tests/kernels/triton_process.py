"""A process in which Triton interprets its kernels: that has to be said before triton is imported."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import pytest

TIMEOUT_S = 300

without_triton = pytest.mark.skipif(find_spec("triton") is None, reason="triton is made for Linux on x86-64")


def _interpret() -> None:
    os.environ["TRITON_INTERPRET"] = "1"


def _loops() -> str | None:
    """Why the interpreter cannot count a loop; None where it can. That of triton 3.6 makes numbers of arrays of one
    element, which NumPy has refused since 2.4."""
    import numpy
    import torch
    import triton
    import triton.language as tl

    @triton.jit
    def count(x, times):
        for _ in range(times):
            tl.store(x, tl.load(x) + 1)

    x = torch.zeros(1)
    try:
        count[(1,)](x, 3)
    except triton.runtime.errors.InterpreterError as error:
        return f"the interpreter of triton {triton.__version__} fails with NumPy {numpy.__version__}: {error}"
    return None if x == 3 else f"a loop counts to {x} in place of 3"


def _call(module: str, name: str, args: tuple[Any, ...]) -> Any:
    return getattr(import_module(module), name)(*args)


@pytest.fixture(scope="module")
def interpreted() -> Iterator[Callable[..., Any]]:
    """`interpreted(function, *args)` calls a function of a test's module there."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, context, _interpret) as pool:
        if why := pool.submit(_loops).result(TIMEOUT_S):
            pytest.skip(why)
        # By its name: what hypothesis makes of a function is not found by pickle.
        yield lambda function, *args: pool.submit(_call, function.__module__, function.__name__, args).result(TIMEOUT_S)
