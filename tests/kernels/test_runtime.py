"""A first start says what it is waiting for, and what is compiled for other types is a first start too."""

from __future__ import annotations

import contextlib
import errno
import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from megasnn.kernels import runtime
from megasnn.kernels.products import ConvolutionProducts


@pytest.mark.parametrize(("patience", "said"), [(0.1, 1), (60.0, 0)])
def test_slow_compiling_is_announced_once(monkeypatch, capsys, patience: float, said: int) -> None:
    monkeypatch.setattr(runtime, "ANNOUNCED_AFTER_S", patience)
    monkeypatch.setattr(runtime, "_announced", threading.Event())
    for _ in range(2):

        def kernel(array: np.ndarray, first: int, last: int) -> None:
            time.sleep(0.3)

        runtime.run(kernel, 1, np.zeros(1))
    assert capsys.readouterr().err.count("compiling the fused kernels") == said


def test_one_process_compiles_for_each_combination_of_types(monkeypatch) -> None:
    compiled: list[str] = []

    @contextlib.contextmanager
    def noted(kernel: Any) -> Iterator[None]:
        compiled.append(kernel.__name__)
        yield

    def kernel(*_: Any) -> None:
        """Stands for one that is given bits, sizes and values of the type that is computed in."""

    monkeypatch.setattr(runtime, "_one_process", noted)
    bits, sizes = np.zeros(1, np.uint8), (1, 2)
    for _ in range(2):
        for first, second in (("f4", "f4"), ("f8", "f8"), ("f4", "f8")):
            runtime.run(kernel, 1, bits, np.zeros(2, first), sizes, np.zeros((2, 2), second), 3)
    assert compiled == ["kernel"] * 3


@pytest.mark.parametrize("fails", ["f4", "f8"])
def test_a_full_disk_is_met_in_each_type(fails: str) -> None:
    """Machine code that cannot be stored is there nevertheless, and is run."""
    calls = []

    def kernel(bits: np.ndarray, values: np.ndarray, first: int, last: int) -> None:
        calls.append(values.dtype)
        if values.dtype == fails and calls.count(values.dtype) == 1:
            raise OSError(errno.ENOSPC, "No space left on device")

    for dtype in ("f4", "f8"):
        runtime.run(kernel, 1, np.zeros(1, np.uint8), np.zeros(1, dtype))
    assert calls.count(np.dtype(fails)) == 2 and len(calls) == 3


def test_sums_over_spikes_are_compiled_by_one_process_in_each_type(monkeypatch) -> None:
    loops = pytest.importorskip("megasnn.kernels.sparse.loops")
    monkeypatch.setattr(runtime, "_compiled", set())
    compiled = []
    one_process = runtime._one_process
    monkeypatch.setattr(runtime, "_one_process", lambda kernel: compiled.append(kernel) or one_process(kernel))
    sparse = ConvolutionProducts(sparse=True)
    for dtype in (torch.float32, torch.float64):
        x = (torch.rand(2, 4, 4, 16) < 0.2).to(dtype).movedim(-1, 1)
        weight = torch.randn(16, 16, 1, 1, dtype=dtype)
        sparse.add_weight_gradient(torch.zeros_like(weight), sparse.output(x, weight), x)
    assert [compiled.count(each) for each in (loops.outputs, loops.weight_gradients)] == [2, 2]
