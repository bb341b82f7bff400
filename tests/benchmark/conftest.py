"""Ranks that start at once."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from megasnn.kernels.tensor_cores import CUBLAS, let_products_round
from tests.forking import forking
from tools.benchmark import ranks


@pytest.fixture
def products_of_before() -> Iterator[None]:
    """A benchmark's process has products of one precision; the tests' process goes on."""
    before = CUBLAS.fp32_precision
    yield
    let_products_round(True)
    CUBLAS.fp32_precision = before


@pytest.fixture
def forked_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks are forked from the server of the tests, for a test that does not look at their memory."""
    context = forking()
    monkeypatch.setattr(ranks.multiprocessing, "get_context", lambda method: context)
