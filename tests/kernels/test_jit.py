"""Machine code in the cache: ranks that need nothing compiled wait for nobody, and a full disk stops nothing."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
from filelock import FileLock
from numba.core.caching import FunctionCache

from megasnn.cache import cache_folder
from megasnn.kernels.numba import jit
from tests.kernels.models import torch_threads

ADD = """
from megasnn.kernels.numba.jit import kernel, run

@kernel
def add(x, first, last):
    for i in range(first, last):
        x[i] += 1
"""
PROGRAM = """
import numpy, sys
sys.path.insert(0, sys.argv[1])
from add import add, run
x = numpy.zeros(9, sys.argv[2])
run(add, 9, x)
print(x.sum(), sum(add.stats.cache_hits.values()))
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MEGASNN_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("NUMBA_CACHE_DIR", raising=False)
    (tmp_path / "add.py").write_text(ADD)
    return tmp_path


def added(folder: Path, dtype: str, timeout: float | None = None) -> tuple[list[str], str]:
    """Sum and hits in the cache, and what it told."""
    told = subprocess.run(
        [sys.executable, "-c", PROGRAM, folder, dtype], capture_output=True, text=True, timeout=timeout, check=True
    )
    return told.stdout.split(), told.stderr


def test_a_cached_kernel_takes_no_lock_and_others_wait_for_it(folder: Path) -> None:
    assert added(folder, "f4") == (["9.0", "0"], mock.ANY)
    with FileLock(cache_folder() / ".compile.add.add.lock"):
        values, told = added(folder, "f4", timeout=60)
        assert values == ["9.0", "1"] and "compiling" not in told
        with pytest.raises(subprocess.TimeoutExpired):
            added(folder, "f8", timeout=5)
    values, told = added(folder, "f8")
    assert values == ["9.0", "0"] and told.count("compiling") == 1


def test_machine_code_that_cannot_be_saved_is_run(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(folder))
    import add  # type: ignore[import-not-found]

    x = np.zeros(1000)
    with mock.patch.object(FunctionCache, "save_overload", side_effect=OSError(28, "No space left on device")):
        with torch_threads(3):
            jit.run(add.add, 1000, x)
    assert (x == 1).all()
    with FileLock(cache_folder() / ".compile.add.add.lock", timeout=1):
        pass
