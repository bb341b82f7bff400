"""A rank that measures costs for the planner, and takes steps of runs on layouts, whose tensors are counted."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from itertools import pairwise

from megasnn.config import ParallelConfig
from megasnn.models.building import describe
from megasnn.optim.build import held_state_bytes
from megasnn.planner.analysis import Analysis
from megasnn.planner.measuring import measured
from megasnn.telemetry.allocations import AllocationCounter
from tools.benchmark.ranks import RankTask, Worlds, set_up_rank
from tools.benchmark.training_steps import MegaSNNStep, counted_peak
from tools.benchmark.two_ranks import Run


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


@dataclass(frozen=True)
class Tried:
    """Attributes: bytes of weights, gradients, optimizer state and what two steps take beside; seconds of a step."""

    bytes: int
    seconds: float


class StepsRank:
    """Imports everything when made; there is no process group between two calls."""

    def __init__(self, task: RankTask[None]) -> None:
        set_up_rank(task)
        self._worlds = Worlds(task)

    def analyse(self, run: Run) -> Analysis:
        """Of one rank and of two. Collective over both ranks."""
        config = run.configuration()
        known = run.counted() if self._worlds.rank == 0 else None  # other ranks are pretended: no world is there yet
        with self._worlds.of_first(self._worlds.ranks):
            return measured(describe(config.model, config.neuron.spec), config, known)

    def steps(self, run: Run, parallel: ParallelConfig, ranks: int, count: int, counts_memory: bool) -> Taken | None:
        """Builds the model on the first ranks, takes two steps to warm up and then so many; None on the others.

        Args:
            counts_memory: whether that is wanted.
        """
        with self._built(run, parallel, ranks) as work:
            if work is None:
                return None
            needed = counted_peak(work, work.engine.state.device, ranks) if counts_memory else 0
            ends = [time.monotonic()]
            for _ in range(2 + count):
                work.forward_backward()
                work.update()
                ends.append(time.monotonic())
            times = [end - begin for begin, end in pairwise(ends)]
            return Taken(times[2:], held_bytes(work) if counts_memory else 0, needed)

    def tried(self, run: Run, parallel: ParallelConfig, ranks: int) -> Tried | None:
        """Builds the model on the first ranks, and takes two steps whose memory is counted and one that is timed; None
        on the others."""
        with self._built(run, parallel, ranks) as work:
            if work is None:
                return None
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

    @contextmanager
    def _built(self, run: Run, parallel: ParallelConfig, ranks: int) -> Iterator[MegaSNNStep | None]:
        """Inside, the model on the first ranks; None on the others."""
        with self._worlds.of_first(ranks) as is_in:
            if not is_in:
                yield None
                return
            work = MegaSNNStep(replace(run.configuration(), parallel=parallel))
            with closing(work.engine):
                yield work


def slowest(of_ranks: Sequence[Taken]) -> list[float]:
    """Seconds of each step, on the rank where it takes longest."""
    return [max(step) for step in zip(*(each.seconds for each in of_ranks), strict=True)]


def held_bytes(work: MegaSNNStep) -> int:
    """Of weights, gradients and optimizer state, and buffers that others' weights come in."""
    distributed, plan = work.engine.distributed, work.engine.plan
    weights = sum(entry.tensor.nbytes for entry in distributed.tensors)
    if (shared := plan.schedules.weights) is not None:
        schedule = plan.schedules.training(plan.micro_batches)
        weights += shared.gathered_and_buffers(schedule, distributed.state.pipeline.rank)[1]
    return weights + distributed.data_parallel.held_bytes + held_state_bytes(work.engine.step.optimizer)
