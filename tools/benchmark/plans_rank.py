"""A rank that measures costs for the planner, and then takes steps on the layouts that were planned with them."""

from __future__ import annotations

import gc
import time
from contextlib import ExitStack
from dataclasses import dataclass, replace

import torch.distributed as dist

from megasnn.config import ParallelConfig
from megasnn.models.building import describe
from megasnn.planner.analysis import Analysis
from megasnn.planner.analyze import counted_sizes
from megasnn.planner.measuring import measured
from megasnn.telemetry.allocations import AllocationCounter
from megasnn.telemetry.memory import keep_free_memory
from tools.benchmark.plans_flags import PlansBenchmark
from tools.benchmark.ranks import RankTask, join_ranks, set_up_rank
from tools.benchmark.training_steps import MegaSNNStep


@dataclass(frozen=True)
class Taken:
    """Seconds of each step on this rank, and bytes that one has needed above weights, gradients and optimizer state."""

    seconds: list[float]
    bytes: int


class PlansRank:
    """Imports everything when made; there is no process group between two calls."""

    def __init__(self, task: RankTask[PlansBenchmark]) -> None:
        set_up_rank(task)
        self._task, self._calls = task, 0

    def analyse(self) -> Analysis:
        """Of one rank and of two. Collective over both ranks."""
        config = self._task.work.configuration()
        model = describe(config.model, config.neuron.spec)
        known = counted_sizes(model, config, [1, 2], [2]) if self._task.rank == 0 else None
        self._join(self._task.ranks)
        found = measured(model, config, known)
        self._leave()
        return found

    def steps(self, parallel: ParallelConfig, ranks: int, count: int, counts_memory: bool) -> Taken | None:
        """Builds the model on the first ranks, takes two steps to warm up and then so many; None on the others."""
        if self._task.rank >= ranks:
            self._calls += 1
            return None
        keep_free_memory()
        self._join(ranks)
        work = MegaSNNStep(replace(self._task.work.configuration(), parallel=parallel))
        with ExitStack() as at_end:
            at_end.callback(self._leave)
            at_end.callback(work.engine.close)
            ends = [time.monotonic()]
            for _ in range(2 + count):
                work.forward_backward()
                work.update()
                ends.append(time.monotonic())
            times = [end - begin for begin, end in zip(ends[2:], ends[3:], strict=False)]
            return Taken(times, self._counted(work) if counts_memory else 0)

    def _counted(self, work: MegaSNNStep) -> int:
        gc.collect()
        counter = AllocationCounter(work.engine.distributed.state.device)
        with counter.counting():
            work.forward_backward()
            work.engine.distributed.share_rows()
        return counter.peak

    def _join(self, ranks: int) -> None:
        self._calls += 1
        if ranks > 1:
            join_ranks(f"{self._task.store}-{self._calls}", self._task.rank, ranks)

    @staticmethod
    def _leave() -> None:
        if dist.is_initialized():
            dist.destroy_process_group()
