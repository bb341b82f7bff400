"""One rank of the rehearsal: the engine's parts over a model that sleeps."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import ExitStack

import torch
import torch.distributed as dist

from megasnn.engine.distributed_model import DistributedModel
from megasnn.engine.setup import build_context
from megasnn.models.building import describe
from megasnn.parallel_state import initialize_model_parallel
from megasnn.pipeline.costs import PipelineCosts, layers_per_chunk
from megasnn.pipeline.measured import measure_layers
from megasnn.pipeline.order import PipelineRequest
from megasnn.pipeline.p2p import WireOptions
from megasnn.pipeline.plan import plan_pipeline
from megasnn.pipeline.step_state import MicroBatchInput
from megasnn.schedule import Action
from megasnn.schedule.build import chunks_of_schedule
from megasnn.telemetry.timers import Mark
from tools.benchmark.models import ModelName, dimensions_of
from tools.benchmark.nccl_like import nccl_like
from tools.benchmark.queued_device import Device, wait_until
from tools.benchmark.ranks import RankTask, join_ranks, set_up_rank
from tools.benchmark.rehearsal_flags import Prepared, RankStep, RehearsalBenchmark
from tools.benchmark.sleeping import SleepingLayer, sleeping_model

WARM_UP = 2  # steps: sizes are known after the first one, so that messages are received ahead from the second one on
HEAD_START = 0.1  # seconds in which ranks agree on when a step begins


class Rehearsal:
    """A rank in a world of `nccl_like` ranks, over links: `prepare` makes what executes a schedule, `step` takes its
    name.

    Args:
        device: this rank's.
    """

    def __init__(self, flags: RehearsalBenchmark, device: Device) -> None:
        self._flags, self._device = flags, device
        self._state = initialize_model_parallel(1, flags.stages, weight_parallel_size=flags.weight_parallel_size)
        self._context = build_context(self._state, "fp32", "auto")
        self._models: dict[str, DistributedModel] = {}

    def prepare(self, name: str, layers: Sequence[SleepingLayer]) -> Prepared:
        """Collective over all ranks, as everything here."""
        flags, model = self._flags, sleeping_model(layers, self._device.compute)
        costs = PipelineCosts(tuple(each.cost() for each in layers), flags.links.cost())
        count = flags.micro_batches
        request = PipelineRequest(
            name, chunks_of_schedule(name), None, None, 1, (count,), predicts=True, recompute=flags.recompute
        )
        plan = plan_pipeline(model, request, self._context, self._state, WireOptions(), costs)
        self._models[name] = DistributedModel(
            model,
            self._state,
            self._context,
            plan.bounds,
            plan.schedules,
            rows_have_owners=flags.use_distributed_optimizer,
        )
        with self._device.without_computing():
            for _ in range(WARM_UP):
                self.step(name)
        simulation = plan.simulation(count)
        assert simulation is not None
        return Prepared(plan.schedules.training(count), simulation, layers_per_chunk(plan.bounds))

    def step(self, name: str) -> RankStep:
        """All ranks begin together."""
        model, flags = self._models[name], self._flags
        micro_batches = [input_of(model)] * flags.micro_batches
        marks: list[tuple[Mark, Mark]] = []
        reached: list[float] = []

        def observe(action: Action, start: Mark, end: Mark) -> None:
            marks.append((start, end))
            reached.append(self._device.reached)
            self._device.doing = len(reached)

        model.executor.observer = observe
        begin = begin_together(self._device)
        self._device.moved.clear()
        self._device.doing = 0
        model.forward_backward(micro_batches, flags.micro_batches * flags.replicas)
        model.data_parallel.share_rows()
        self._device.synchronize()
        require_all_added(model, flags.micro_batches * flags.replicas)
        seconds = model.executor.clock.seconds
        clock = [(seconds(start), seconds(end)) for start, end in marks]
        clock[0] = begin, clock[0][1]  # a rank that woke up late has begun late
        return RankStep(list(zip([begin, *reached], reached, strict=False)), clock, list(self._device.moved))


def input_of(model: DistributedModel) -> MicroBatchInput:
    """A micro-batch of a model that sleeps, as this rank has it."""
    image, label = torch.zeros(1, 1, 1, 1), torch.zeros(1, dtype=torch.int64)
    return MicroBatchInput(image if model.takes_images else None, label if model.gives_logits else None, 1, range(1))


def begin_together(device: Device) -> float:
    """All ranks agree on when a step begins, and wait for it. No such time is needed where nothing is computed."""
    head_start = HEAD_START if device.computes else 0.0
    begin = torch.tensor([time.perf_counter() + head_start], dtype=torch.float64)
    dist.all_reduce(begin, dist.ReduceOp.MAX)
    device.reached = begin.item()
    wait_until(device.reached)
    return device.reached


def require_all_added(model: DistributedModel, expected: int) -> None:
    """Raises ValueError where a gradient is not the sum over so many micro-batches, all of all replicas."""
    for entry in model.owned:
        assert entry.tensor.grad is not None, "zeroed before the step"
        found = set(entry.tensor.grad[:, 0].tolist())
        if found - {expected}:
            raise ValueError(f"the gradient of {entry.name} has {found} parts, and should have {expected}")


class RehearsalRank(Rehearsal):
    """In a process of its own."""

    def __init__(self, task: RankTask[RehearsalBenchmark]) -> None:
        set_up_rank(task)
        join_ranks(task.store, task.rank, task.ranks)
        self._entered = ExitStack()
        limit = task.work.timeout
        super().__init__(task.work, self._entered.enter_context(nccl_like(limit, task.work.links)))

    def measure(self, model: ModelName, samples: int) -> list[SleepingLayer]:
        """The layers of a model, as this rank alone finds them."""
        context, device = build_context(self._state, "fp32", "auto"), torch.device("cpu")
        costs = measure_layers(describe(dimensions_of(model)), samples, context, device, WireOptions(), repeats=True)
        return [SleepingLayer.like(cost) for cost in costs]
