"""Sums over spikes are formed in the tests wherever there are loops for them and few spikes: their models are so small
that dense products would take less time, and then nothing would test them in all layouts."""

from __future__ import annotations

from unittest import mock

from megasnn.kernels.numba.spike_sums import Work

MOST = 0.4
worth_by_time = Work.is_worth


def where_few(work: Work, share: float, threads: int = 1) -> bool:
    return share <= MOST


def form_sums_where_few() -> None:
    """For all of this process, and of those that are forked from it."""
    mock.patch.object(Work, "is_worth", where_few).start()
