"""The sample data are made once for all runs."""

from __future__ import annotations

import pytest


@pytest.fixture(scope="session")
def cache(tmp_path_factory) -> str:
    return str(tmp_path_factory.mktemp("cache"))
