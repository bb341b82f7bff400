"""A first start says what it is waiting for."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest

from megasnn.kernels import runtime


@pytest.mark.parametrize(("patience", "said"), [(0.1, 1), (60.0, 0)])
def test_slow_compiling_is_announced_once(monkeypatch, capsys, patience: float, said: int) -> None:
    monkeypatch.setattr(runtime, "ANNOUNCED_AFTER_S", patience)
    monkeypatch.setattr(runtime, "_announced", threading.Event())
    for _ in range(2):

        def kernel(array: np.ndarray, first: int, last: int) -> None:
            time.sleep(0.3)

        runtime.run(kernel, 1, np.zeros(1))
    assert capsys.readouterr().err.count("compiling the fused kernels") == said
