"""Ranks that start at once."""

from __future__ import annotations

import pytest

from tests.forking import forking
from tools.benchmark import ranks


@pytest.fixture
def forked_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks are forked from the server of the tests, for a test that does not look at their memory."""
    context = forking()
    monkeypatch.setattr(ranks.multiprocessing, "get_context", lambda method: context)
