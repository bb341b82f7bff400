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
    """Ranks are forked from the server of the tests, which has imported everything.

    For a test that looks at no figure of what a process by itself takes; test_the_folder_is_a_program_from_anywhere and
    test_ranks.py have ranks that are interpreters of their own.
    """
    context = forking()
    monkeypatch.setattr(ranks.multiprocessing, "get_context", lambda method: context)
