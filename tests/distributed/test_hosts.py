"""Hosts whose clocks or versions differ are named at the start of a run."""

from __future__ import annotations

import time
from unittest import mock

import pytest

from megasnn.parallel_state import destroy_model_parallel, get_parallel_state, initialize_model_parallel
from megasnn.training import hosts


def notice_of(name: str, seconds: float, version: str) -> str:
    """What a rank is told that stands for a host of its own, for its first rank's host with 0 seconds."""
    initialize_model_parallel()
    state = get_parallel_state()
    now = time.time
    if state.rank == 0:
        name, seconds, version = "first", 0.0, "0.1"
    try:
        with (
            mock.patch.object(hosts.platform, "node", lambda: name),
            mock.patch.object(hosts.time, "time", lambda: now() + seconds),
            mock.patch.object(hosts, "__version__", version),
        ):
            return hosts.host_notice(state)
    finally:
        destroy_model_parallel()


def test_hosts_that_agree_are_not_told_of(ranks) -> None:
    assert ranks(2, notice_of, "second", 1.0, "0.1") == ["", ""]


@pytest.mark.parametrize(("seconds", "ahead"), [(3600.0, "second is 3600 s"), (-60.0, "first is 60 s")])
def test_a_clock_that_is_ahead_or_behind(ranks, seconds, ahead) -> None:
    first, second = ranks(2, notice_of, "second", seconds, "0.1")
    assert first == second and first.startswith(f"WARNING: the clock of {ahead} ahead of that of ")


def test_other_versions(ranks) -> None:
    first, second = ranks(2, notice_of, "second", 0.0, "0.2")
    assert first == second
    assert "different versions: first: megasnn 0.1, torch" in first and "second: megasnn 0.2, torch" in first
