"""Fixtures of the benchmark's tests."""

from __future__ import annotations

import pytest

from tests.forking import forking
from tools.benchmark import ranks as ranks_of_benchmark


@pytest.fixture
def forked_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forks ranks from the server of the tests, for tests that look at no figure of a process by itself."""
    context = forking()
    monkeypatch.setattr(ranks_of_benchmark.multiprocessing, "get_context", lambda method: context)
