"""One rank of the benchmark of schedules: an engine for every schedule, which take steps when told to."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from megasnn.config import ParallelConfig, PretrainConfig, TrainingConfig
from megasnn.engine.setup import build_context
from megasnn.free_memory import release_free_memory
from megasnn.models.building import describe
from megasnn.parallel.traffic import statistics
from megasnn.parallel_state import BACKENDS, initialize_model_parallel
from megasnn.pipeline.choose_schedule import PipelineRequest
from megasnn.pipeline.cost_model import PipelineCosts, layers_per_chunk
from megasnn.pipeline.p2p import WireOptions
from megasnn.pipeline.plan import PipelinePlan, plan_pipeline
from megasnn.pipeline.profile_layers import profile_pipeline
from megasnn.schedule.plan import chunks_of_schedule
from megasnn.telemetry.memory import peak_memory_mb, reset_peak_memory
from tools.benchmark.models import ModelName, configuration, dimensions_of
from tools.benchmark.pipeline_flags import ONE_BATCH, PipelineBenchmark, PipelineTurn
from tools.benchmark.ranks import RankTask, join_ranks, set_up_rank
from tools.benchmark.training_steps import ENDLESS, OPTIMIZER, MegaSNNStep


class PipelineRank:
    """`prepare` plans a row, the others take its name. A process has one Engine at a time: each turn makes its own."""

    def __init__(self, task: RankTask[tuple[PipelineBenchmark, ModelName]]) -> None:
        set_up_rank(task)
        self._flags, model = task.work
        self._device = torch.device("cpu")
        if self._flags.device == "cuda":
            self._device = torch.device("cuda", task.rank)
            torch.cuda.set_device(self._device)
        if task.ranks > 1:
            join_ranks(task.store, task.rank, task.ranks, BACKENDS[self._device.type])
        self._state = initialize_model_parallel(1, task.ranks, self._device)
        self._dimensions = dimensions_of(model)
        self._model = describe(self._dimensions)
        self._context = build_context(self._state, "fp32", "auto")
        self._rows: dict[str, _Row] = {}
        self._costs: PipelineCosts | None = None

    def prepare(self, name: str) -> dict[str, Any]:
        """Builds the engine and takes two steps, the second with the traffic counted."""
        if self._costs is None and self._state.pipeline.size > 1:
            self.measure_costs()
        row = self._rows[name] = self._planned(name)
        with row.running():
            row.step()
            statistics.reset()
            with statistics.counting():
                row.step()
        return row.about(self._forward_ratio())

    def measure_costs(self) -> None:
        state, size = self._state, self._flags.micro_batch_size
        self._costs = profile_pipeline(self._model, size, self._context, state)

    def measure(self, name: str, steps: int) -> PipelineTurn:
        row = self._rows[name]
        with row.running():
            row.step()  # takes memory, and caches saw another row last
            gc.collect()
            peak = row.peak_of_schedule(self._device)
            timed = [row.step() for _ in range(steps)]
        return PipelineTurn([whole for whole, _ in timed], [schedule for _, schedule in timed], peak)

    def simulate(self, name: str) -> float:
        """Seconds of the schedule by the costs measured last."""
        row = self._rows[name]
        result = replace(row.plan, costs=self._costs).simulation(self._flags.micro_batches)
        assert result is not None
        return result.makespan

    def _planned(self, name: str) -> _Row:
        flags, state = self._flags, self._state
        schedule = name if state.pipeline.size > 1 else "1f1b"
        count, size = (1, flags.samples) if name == ONE_BATCH else (flags.micro_batches, flags.micro_batch_size)
        request = PipelineRequest(schedule, chunks_of_schedule(schedule), None, size, (count,))
        plan = plan_pipeline(self._model, request, self._context, state, WireOptions(), self._costs)
        config = configuration(
            self._dimensions,
            training=TrainingConfig(micro_batch_size=size, global_batch_size=flags.samples, train_iters=ENDLESS),
            parallel=ParallelConfig(pipeline_model_parallel_size=state.pipeline.size, pipeline_schedule=schedule),
            optimizer=OPTIMIZER,
        )
        return _Row(plan, config, count)

    def _forward_ratio(self) -> float | None:
        """Bytes of activations that all stages send, as a part of what they take unpacked; None without stages."""
        mine = [t for (group, _, way), t in statistics.read().items() if (group, way) == ("pipeline", "forward")]
        sums = torch.tensor([sum(t.bytes for t in mine), sum(t.dense_bytes for t in mine)], dtype=torch.float64)
        if self._state.pipeline.size == 1:
            return None
        dist.all_reduce(sums)
        return (sums[0] / sums[1]).item()


class _Row:
    """One schedule, and the engine that runs it in a turn."""

    def __init__(self, plan: PipelinePlan, config: PretrainConfig, count: int) -> None:
        self.plan, self._config, self._count = plan, config, count

    @contextmanager
    def running(self) -> Iterator[None]:
        """Has an engine inside."""
        self._work = MegaSNNStep(self._config, self.plan)
        with closing(self._work.engine):
            yield
        del self._work

    def step(self) -> tuple[float, float]:
        """Seconds of a whole step, and of its schedule. All ranks begin together and end together."""
        _together()
        start = time.perf_counter()
        self._work.forward_backward()  # gives the loss, and so waits for the device
        middle = time.perf_counter()
        self._work.update()
        _together()
        return time.perf_counter() - start, middle - start

    def peak_of_schedule(self, device: torch.device) -> float:
        """MB that a step's schedule needs above what is there before it; the step is not finished."""
        release_free_memory()
        reset_peak_memory(device)
        before = peak_memory_mb(device)
        self._work.forward_backward()
        return peak_memory_mb(device) - before

    def about(self, forward_ratio: float | None) -> dict[str, Any]:
        plan, count = self.plan, self._count
        facts: dict[str, Any] = {
            "schedule": plan.schedules.training(count).name,
            "layout": layers_per_chunk(plan.bounds),
            "forward_bytes_ratio": forward_ratio,
        }
        simulation = plan.simulation(count)
        if simulation is not None:
            facts["bubble"] = simulation.idle_share
            facts["peak_mb"] = [held / 1e6 for held in plan.step_bytes(count)]
        return facts


def _together() -> None:
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
    if dist.is_initialized():
        dist.barrier()
