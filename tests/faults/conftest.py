"""One cache for all runs of these tests, and small shards."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.data.shard_files import numbered, write_shard
from tests.faults.launch import end_all


@pytest.fixture(scope="session", autouse=True)
def cache(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MEGASNN_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(autouse=True)
def no_process_is_left():
    yield
    end_all()


@pytest.fixture
def shards(tmp_path) -> list[Path]:
    """Two shards of eight samples of three classes each."""
    return [write_shard(tmp_path / f"train-{i:05d}.tar", numbered(range(8 * i, 8 * i + 8))) for i in range(2)]
