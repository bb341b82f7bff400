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


@pytest.mark.parametrize(
    ("seconds", "version", "named"),
    [
        (1.0, "0.1", None),
        (3600.0, "0.1", "second is 3600 s ahead"),
        (-60.0, "0.1", "first is 60 s ahead"),
        (0.0, "0.2", "first: megasnn 0.1"),
    ],
)
def test_hosts_that_differ_are_named_on_all(ranks, seconds: float, version: str, named: str | None) -> None:
    first, second = ranks(2, notice_of, "second", seconds, version)
    assert first == second and (first == "" if named is None else named in first)
