"""Machine code in the cache: who needs nothing compiled waits for nobody, and a full disk stops nothing."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import numba
import numpy as np
import pytest
from filelock import FileLock
from numba.core.caching import FunctionCache

from megasnn.cache import cache_folder
from megasnn.kernels.numba.jit import kernel, run
from tests.kernels.models import torch_threads


def add(x, first, last):
    for i in range(first, last):
        x[i] += 1


LOCK = f".compile.{__name__}.add.lock"


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


def test_a_cached_kernel_takes_no_lock_and_others_wait_for_it(compiled, capsys: pytest.CaptureFixture[str]) -> None:
    assert added(compiled(), "f4") == 9
    with FileLock(cache_folder() / LOCK):
        second = compiled()
        assert added(second, "f4") == 9 and sum(second.stats.cache_hits.values()) == 1
        found: list[float] = []
        waiting = threading.Thread(target=lambda: found.append(added(compiled(), "f8")), daemon=True)
        waiting.start()
        waiting.join(0.5)
        assert waiting.is_alive() and not found
    waiting.join(60)
    assert found == [9] and capsys.readouterr().err.count("compiling") <= 1


def test_machine_code_that_cannot_be_saved_is_run(compiled) -> None:
    full = mock.patch.object(FunctionCache, "save_overload", side_effect=OSError(28, "No space left on device"))
    with full as saved, torch_threads(3):
        assert added(compiled(), "f4") == 9 and saved.called
    with FileLock(cache_folder() / LOCK, timeout=1):
        pass
