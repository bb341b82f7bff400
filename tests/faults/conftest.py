"""One cache for all runs of these tests, and the end of all processes that one has left."""

from __future__ import annotations

import pytest

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
