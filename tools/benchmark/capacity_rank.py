"""A rank that takes steps of whatever size is tried, and counts what its tensors take."""

from __future__ import annotations

import gc
import time
from contextlib import ExitStack
from dataclasses import dataclass, replace

import torch.distributed as dist

from megasnn.config import ParallelConfig
from megasnn.telemetry.allocations import AllocationCounter
from megasnn.telemetry.memory import keep_free_memory
from tools.benchmark.capacity_flags import CapacityBenchmark
from tools.benchmark.ranks import RankTask, join_ranks, set_up_rank
from tools.benchmark.training_steps import MegaSNNStep


@dataclass(frozen=True)
class Tried:
    """Attributes: bytes of weights, gradients, optimizer state and what two steps take beside; seconds of a step."""

    bytes: int
    seconds: float


class CapacityRank:
    """Imports everything when made; there is no process group between two calls."""

    def __init__(self, task: RankTask[CapacityBenchmark]) -> None:
        set_up_rank(task)
        self._task, self._calls = task, 0

    def tried(self, size: int, parallel: ParallelConfig, ranks: int) -> Tried | None:
        """Builds the model of that size on the first ranks, and takes two steps whose memory is counted and one that is
        timed; None on the other ranks."""
        self._calls += 1
        if self._task.rank >= ranks:
            return None
        keep_free_memory()
        if ranks > 1:
            join_ranks(f"{self._task.store}-{self._calls}", self._task.rank, ranks)
        with ExitStack() as at_end:
            at_end.callback(_leave)
            work = MegaSNNStep(replace(self._task.work.configuration(size), parallel=parallel))
            at_end.callback(work.engine.close)
            distributed = work.engine.distributed
            weights = sum(entry.tensor.nbytes for entry in distributed.tensors)
            held = weights + distributed.data_parallel.held_bytes
            gc.collect()
            counter = AllocationCounter(distributed.state.device)
            with counter.counting():  # the first step takes the optimizer's state, the second has its peak above that
                for _ in range(2):
                    work.forward_backward()
                    work.update()
            begin = time.monotonic()
            work.forward_backward()
            work.update()
            return Tried(held + counter.peak, time.monotonic() - begin)


def _leave() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()
