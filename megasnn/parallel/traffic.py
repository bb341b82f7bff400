"""Counts of exchanges between ranks: calls and bytes by group, operation and phase."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple


@dataclass
class Traffic:
    """Calls and bytes: received in a collective, sent in a message. `dense_bytes` are without packing."""

    calls: int = 0
    bytes: int = 0
    dense_bytes: int = 0

    def add(self, calls: int, moved: int, dense: int) -> None:
        self.calls += calls
        self.bytes += moved
        self.dense_bytes += dense


class TrafficKey(NamedTuple):
    """`phase`: "forward", "backward", "weights" (gathering sharded weights), or "step" outside a schedule's actions."""

    group: str
    operation: str
    phase: str


class CommStatistics:
    """Counts exchanges between ranks while enabled.

    Example::

        with traffic.counting():
            engine.train_step(images, labels)
        print(traffic.table())

    Attributes:
        counts: by group, operation and phase, since the last reset.
        phase: of the exchanges now; the executor sets it.
    """

    def __init__(self) -> None:
        self.enabled = False
        self.phase = "step"
        self.reset()

    def reset(self) -> None:
        self.counts: dict[TrafficKey, Traffic] = defaultdict(Traffic)

    @contextmanager
    def counting(self, enabled: bool = True) -> Iterator[None]:
        was_enabled = self.enabled
        self.enabled = enabled
        try:
            yield
        finally:
            self.enabled = was_enabled

    @contextmanager
    def separate(self) -> Iterator[dict[TrafficKey, Traffic]]:
        """Yields the traffic inside, which is not added to the rest. For CUDA graphs, whose replays pass no Python."""
        before = self.counts
        self.counts = defaultdict(Traffic)
        try:
            with self.counting():
                yield self.counts
        finally:
            self.counts = before

    def add(self, moved: Mapping[TrafficKey, Traffic]) -> None:
        if self.enabled:
            for key, each in moved.items():
                self.counts[key].add(each.calls, each.bytes, each.dense_bytes)

    def record(self, group: str, operation: str, moved: int, dense: int | None = None) -> None:
        if self.enabled:
            key = TrafficKey(group, operation, self.phase)
            self.counts[key].add(1, moved, moved if dense is None else dense)

    @property
    def by_group(self) -> dict[str, Traffic]:
        sums: dict[str, Traffic] = defaultdict(Traffic)
        for key, each in self.counts.items():
            sums[key.group].add(each.calls, each.bytes, each.dense_bytes)
        return sums

    def total(self) -> Traffic:
        total = Traffic()
        for each in self.counts.values():
            total.add(each.calls, each.bytes, each.dense_bytes)
        return total

    def table(self) -> str:
        """This rank's counts as text, a line for each group, operation and phase."""
        form = "{:<12}  {:<14}  {:<8}  {:>6}  {:>12}  {:>12}"
        lines = [form.format("group", "operation", "phase", "calls", "MB", "MB unpacked")]
        for key, each in sorted(self.counts.items()):
            lines.append(form.format(*key, each.calls, f"{each.bytes / 1e6:.3f}", f"{each.dense_bytes / 1e6:.3f}"))
        return "\n".join(lines)


traffic = CommStatistics()
