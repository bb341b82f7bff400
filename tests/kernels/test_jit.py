"""Machine code in the cache: it is found again, and a full disk stops nothing."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import numba
import numpy as np
import pytest
from numba.core.caching import FunctionCache

from megasnn.kernels.numba.jit import kernel, run
from tests.kernels.models import torch_threads


def add(x, first, last):
    for i in range(first, last):
        x[i] += 1


@pytest.fixture
def compiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], Any]:
    """The kernel as another process would have it."""
    monkeypatch.setenv("MEGASNN_CACHE", str(tmp_path))
    # Both: numba reads its environment anew when that has changed.
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path / "numba"))
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path / "numba"))
    return lambda: kernel(add)


def added(function: Any, dtype: str) -> float:
    x = np.zeros(9, dtype)
    run(function, 9, x)
    return float(x.sum())


def test_machine_code_is_found_again(compiled, capsys: pytest.CaptureFixture[str]) -> None:
    assert added(compiled(), "f4") == 9
    second = compiled()
    with mock.patch("megasnn.kernels.numba.jit.FileLock", side_effect=AssertionError("nobody waits for a lock")):
        assert added(second, "f4") == 9 and sum(second.stats.cache_hits.values()) == 1
    assert capsys.readouterr().err.count("compiling") <= 1


def test_machine_code_that_cannot_be_saved_is_run(compiled) -> None:
    full = mock.patch.object(FunctionCache, "save_overload", side_effect=OSError(28, "No space left on device"))
    with full as saved, torch_threads(3):
        assert added(compiled(), "f4") == 9 and saved.called
