"""A rank that measures costs for the planner, and then takes steps on the layouts that were planned with them."""

from __future__ import annotations

import time
from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import pairwise

import torch.distributed as dist

from megasnn.config import ParallelConfig
from megasnn.models.building import describe
from megasnn.optim.building import held_state_bytes
from megasnn.pipeline.shared_weights import gathered_and_buffers
from megasnn.planner.analysis import Analysis
from megasnn.planner.analyze import counted_sizes
from megasnn.planner.measuring import measured
from megasnn.telemetry.memory import keep_free_memory
from tools.benchmark.plans_flags import PlansBenchmark
from tools.benchmark.ranks import RankTask, join_ranks, set_up_rank
from tools.benchmark.training_steps import MegaSNNStep, counted_peak


@dataclass(frozen=True)
class Taken:
    """
    Attributes:
        seconds: of each step on this rank.
        held: bytes of weights, gradients and optimizer state, and buffers that others' weights come in.
        needed: what a step needs at most above that. Both are 0 where they were not asked for.
    """

    seconds: list[float]
    held: int
    needed: int


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
        """Builds the model on the first ranks, takes two steps to warm up and then so many; None on the others.

        Args:
            counts_memory: whether that is wanted.
        """
        if self._task.rank >= ranks:
            self._calls += 1
            return None
        keep_free_memory()
        self._join(ranks)
        work = MegaSNNStep(replace(self._task.work.configuration(), parallel=parallel))
        with ExitStack() as at_end:
            at_end.callback(self._leave)
            at_end.callback(work.engine.close)
            device = work.engine.distributed.state.device
            needed = counted_peak(work, device, ranks) if counts_memory else 0
            ends = [time.monotonic()]
            for _ in range(2 + count):
                work.forward_backward()
                work.update()
                ends.append(time.monotonic())
            times = [end - begin for begin, end in pairwise(ends)]
            return Taken(times[2:], held_bytes(work) if counts_memory else 0, needed)

    def _join(self, ranks: int) -> None:
        self._calls += 1
        if ranks > 1:
            join_ranks(f"{self._task.store}-{self._calls}", self._task.rank, ranks)

    @staticmethod
    def _leave() -> None:
        if dist.is_initialized():
            dist.destroy_process_group()


def held_bytes(work: MegaSNNStep) -> int:
    """Of weights, gradients and optimizer state, and buffers that others' weights come in."""
    distributed, plan = work.engine.distributed, work.engine.plan
    weights = sum(entry.tensor.nbytes for entry in distributed.tensors)
    if (shared := plan.schedules.weights) is not None:
        schedule = plan.schedules.training(plan.micro_batches)
        weights += gathered_and_buffers(shared, schedule, distributed.state.pipeline.rank)[1]
    return weights + distributed.data_parallel.held_bytes + held_state_bytes(work.engine.steps.optimizer)
