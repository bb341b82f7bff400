"""One rank of the benchmark of memory: a model of either library, whose steps are timed, and counted by themselves."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import torch
from spikingjelly.activation_based import memopt
from spikingjelly.activation_based.examples.memopt.models import VGGBlock
from spikingjelly.activation_based.model.spikformer import SpikformerBlock

from megasnn.comm.world import BACKENDS
from megasnn.parallel_state import initialize_model_parallel
from megasnn.training.memory import step_peak
from tools.benchmark.models import Dimensions
from tools.benchmark.ranks import RankTask, join_ranks, set_up_rank
from tools.benchmark.training_steps import MegaSNNStep, SpikingJellyStep, counted_peak, megasnn_step

CHECKPOINTED = (SpikformerBlock, VGGBlock)  # as SpikingJelly's own training scripts have it


@dataclass(frozen=True)
class MemoryRow:
    """
    Attributes:
        parallel: of our rows, see ParallelConfig; None for SpikingJelly. optimized: with its own memory optimisation.
        ranks: data parallel.
    """

    name: str
    parallel: dict[str, Any] | None = None
    optimized: bool = False
    ranks: int = 1


@dataclass(frozen=True)
class MemoryWork:
    """What a row computes: micro-batches of a replica in a step, and samples in each."""

    row: MemoryRow
    model: Dimensions
    micro_batches: int
    micro_batch_size: int
    device: str


class MemoryRank:
    """Builds the model when made, and takes a step, which pays for what is taken once."""

    def __init__(self, task: RankTask[MemoryWork]) -> None:
        set_up_rank(task)
        work, row = task.work, task.work.row
        self._device = torch.device(work.device, *([task.rank] if work.device == "cuda" else []))
        self._ours: MegaSNNStep | None = None
        samples = work.micro_batches * work.micro_batch_size
        if row.parallel is None:
            self._step: SpikingJellyStep | MegaSNNStep = _spikingjelly(work, samples, self._device)
        else:
            if task.ranks > 1:
                join_ranks(task.store, task.rank, task.ranks, BACKENDS[self._device.type])
            initialize_model_parallel(device=self._device)
            size = work.micro_batch_size
            self._ours = megasnn_step(work.model, samples * row.ranks, size, "fp32", "auto", **row.parallel)
            self._step = self._ours
        self.measure(1)

    def predicted(self) -> int | None:
        """Bytes of this rank above weights, gradients and optimizer state; None for SpikingJelly."""
        if self._ours is None:
            return None
        engine = self._ours.engine
        return step_peak(engine.config, engine.distributed, engine.plan, engine.distributed.state).total

    def counted(self) -> int:
        """Bytes of this rank above weights, gradients and optimizer state."""
        ranks = 1 if self._ours is None else self._ours.engine.distributed.state.world.size
        return counted_peak(self._step, self._device, ranks)

    def measure(self, steps: int) -> list[float]:
        """Seconds of each step; on a CPU those that the processor has worked for it, whatever else it does."""
        times = []
        for _ in range(steps):
            begun = self._now()
            self._step.forward_backward()
            self._step.update()
            times.append(self._now() - begun)
        return times

    def _now(self) -> float:
        if self._device.type != "cuda":
            return time.process_time()
        torch.cuda.synchronize(self._device)
        return time.perf_counter()


def _spikingjelly(work: MemoryWork, samples: int, device: torch.device) -> SpikingJellyStep:
    """Its whole batch in one go. Gradients stay where they are between steps, as ours do."""
    step = SpikingJellyStep(work.model, samples, "fp32", device, keeps_gradients=True)
    if work.row.optimized:
        images = step.images[:2]
        memopt.optimize_memory(step.model, CHECKPOINTED, lambda model: model(images), level=1)
        step.forget_state()
    return step
