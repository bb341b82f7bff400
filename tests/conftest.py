"""Fixtures shared by all tests: a pool of real ranks that lives for the whole session."""

from __future__ import annotations

import atexit
import contextlib
import gc
import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

# Read with the first product on a GPU, which may be another test's than that of --deterministic.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

# Programs that the tests start compile the sources once, not each for itself: a second of every start.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

import pytest

from megasnn.common.files import SAMPLE_LIMIT, CacheError, cache_folder

# Tests that have a cache of their own need not compile the kernels again.
with contextlib.suppress(CacheError):
    os.environ.setdefault("NUMBA_CACHE_DIR", str(cache_folder("numba")))

from tests.forking import forking
from tests.rank_pool import RankPool
from tests.sums import form_sums_where_few

form_sums_where_few()


@pytest.fixture(scope="module", autouse=True)
def _few_objects_to_look_through() -> None:
    """What modules and tests before have left is not looked through again, whenever Python looks for garbage."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def _server_of_processes() -> None:
    """Starts the process that all others are copied from before a data loader does, which blocks signals in it."""
    forking()


@pytest.fixture
def limits(monkeypatch):
    """Sets the number of bytes that a sample may take."""
    return lambda size: monkeypatch.setenv(SAMPLE_LIMIT, str(size / (1 << 20)))


@pytest.fixture(scope="session")
def ranks():
    """`ranks(world_size, function, *args)` runs a module-level function on Gloo ranks; results come in rank order."""
    pool = RankPool()
    atexit.register(pool.close)
    yield pool.run
    pool.close()
