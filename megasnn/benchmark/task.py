"""What a rank is told when it starts; free of torch, which only the ranks load."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from megasnn.benchmark.config import BenchmarkConfig
from megasnn.benchmark.rows import Row

if TYPE_CHECKING:
    from megasnn.benchmark.worker import Worker


@dataclass(frozen=True)
class RankTask:
    """`store` is a file through which the ranks of a row find each other."""

    config: BenchmarkConfig
    row: Row
    rank: int
    store: str


def make_worker(task: RankTask) -> Worker:
    from megasnn.benchmark.worker import Worker

    return Worker(task)
