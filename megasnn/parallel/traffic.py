"""Counts of collective calls and bytes, by group, operation and direction.

The counters belong to the process. Bytes are those that cross from one rank to another, after spikes have been packed:
of a collective what this rank receives from the others, of a message its payload, where it is sent. Summed over ranks,
every byte is counted once.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace


@dataclass
class Traffic:
    """Calls and bytes of one kind of communication; `dense_bytes` is what the same tensors are without packing."""

    calls: int = 0
    bytes: int = 0
    dense_bytes: int = 0


class CommStatistics:
    """Counters of traffic. Recording costs a dictionary look-up for each collective, nothing outside of counting."""

    def __init__(self) -> None:
        self.enabled = False
        self._traffic: dict[tuple[str, str, str], Traffic] = defaultdict(Traffic)

    @contextmanager
    def counting(self, enabled: bool = True) -> Iterator[None]:
        """Turns counting on, or off, for a while."""
        before, self.enabled = self.enabled, enabled
        try:
            yield
        finally:
            self.enabled = before

    def reset(self) -> None:
        self._traffic.clear()

    def record(self, group: str, operation: str, direction: str, moved: int, dense: int | None = None) -> None:
        if self.enabled:
            counted = self._traffic[group, operation, direction]
            counted.calls += 1
            counted.bytes += moved
            counted.dense_bytes += moved if dense is None else dense

    def read(self) -> dict[tuple[str, str, str], Traffic]:
        """(group, operation, "forward" | "backward" | "step") -> traffic since the last reset."""
        return {key: replace(counted) for key, counted in self._traffic.items()}

    def total(self, group: str | None = None, operation: str | None = None) -> Traffic:
        """Sums all traffic, or that of one group, or of one operation."""
        found = [
            counted
            for (name, kind, _), counted in self._traffic.items()
            if group in (None, name) and operation in (None, kind)
        ]
        return Traffic(*(sum(getattr(each, key.name) for each in found) for key in fields(Traffic)))


traffic = CommStatistics()
