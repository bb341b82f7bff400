"""Ranks that start at once."""

from __future__ import annotations

import multiprocessing

import pytest

from tests.rank_pool import PRELOADED
from tools.benchmark import ranks


@pytest.fixture
def forked_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks are forked from the server of the tests, for a test that does not look at their memory."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    monkeypatch.setattr(ranks.multiprocessing, "get_context", lambda method: context)
