"""Counts of collective calls and bytes, by group.

The counters belong to the process. Bytes are those that cross from one rank to another, after spikes have been packed:
of a collective what this rank receives from the others, of a message its payload, where it is sent. Summed over ranks,
every byte is counted once.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass
class Traffic:
    """Calls and bytes of a group; `dense_bytes` is what the same tensors are without packing."""

    calls: int = 0
    bytes: int = 0
    dense_bytes: int = 0

    def add(self, calls: int, moved: int, dense: int) -> None:
        self.calls, self.bytes, self.dense_bytes = self.calls + calls, self.bytes + moved, self.dense_bytes + dense


class CommStatistics:
    """Counters of traffic. Recording costs a dictionary look-up for each collective, nothing outside of counting."""

    def __init__(self) -> None:
        self.enabled = False
        self.reset()

    def reset(self) -> None:
        self.by_group: dict[str, Traffic] = defaultdict(Traffic)

    @contextmanager
    def counting(self, enabled: bool = True) -> Iterator[None]:
        """Turns counting on, or off, for a while."""
        before, self.enabled = self.enabled, enabled
        try:
            yield
        finally:
            self.enabled = before

    def record(self, group: str, moved: int, dense: int | None = None) -> None:
        if self.enabled:
            self.by_group[group].add(1, moved, moved if dense is None else dense)

    def total(self) -> Traffic:
        total = Traffic()
        for each in self.by_group.values():
            total.add(each.calls, each.bytes, each.dense_bytes)
        return total


traffic = CommStatistics()
