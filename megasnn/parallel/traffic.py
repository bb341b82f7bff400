"""Counts of collective calls and bytes, by group, operation and direction.

The counters belong to the process. Bytes are those that cross from one rank to another, after spikes have been packed:
of a collective what this rank receives from the others, its own share not counted; of a message its payload, where it
is sent. Summed over ranks, every byte is counted once.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass
class Traffic:
    """Calls and bytes of one kind of communication; `dense_bytes` is what the same tensors are without packing."""

    calls: int = 0
    bytes: int = 0
    dense_bytes: int = 0


class CommStatistics:
    """Count, read, reset. Recording costs a dictionary look-up for each collective, and nothing outside of counting."""

    def __init__(self) -> None:
        self.enabled = False
        self._traffic: dict[tuple[str, str, str], Traffic] = defaultdict(Traffic)

    @contextmanager
    def counting(self, enabled: bool = True) -> Iterator[None]:
        """Inside, counting is on, or off; behind it, as before."""
        before, self.enabled = self.enabled, enabled
        try:
            yield
        finally:
            self.enabled = before

    def reset(self) -> None:
        self._traffic.clear()

    def record(self, group: str, operation: str, direction: str, moved: int, dense: int | None = None) -> None:
        if not self.enabled:
            return
        traffic = self._traffic[group, operation, direction]
        traffic.calls += 1
        traffic.bytes += moved
        traffic.dense_bytes += moved if dense is None else dense

    def read(self) -> dict[tuple[str, str, str], Traffic]:
        """(group, operation, "forward" | "backward" | "step") -> traffic since the last reset."""
        return {key: Traffic(t.calls, t.bytes, t.dense_bytes) for key, t in self._traffic.items()}

    def total(self, group: str | None = None, operation: str | None = None) -> Traffic:
        """All traffic, or that of one group, or of one operation."""
        total = Traffic()
        for (name, kind, _), traffic in self._traffic.items():
            if group in (None, name) and operation in (None, kind):
                total.calls += traffic.calls
                total.bytes += traffic.bytes
                total.dense_bytes += traffic.dense_bytes
        return total


statistics = CommStatistics()
