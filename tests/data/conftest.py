"""Every test of the data has a cache folder of its own."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    folder = tmp_path / "cache"
    monkeypatch.setenv("MEGASNN_CACHE", str(folder))
    return folder
