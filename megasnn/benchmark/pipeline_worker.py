"""One rank of the pipeline benchmark: an engine for every schedule, which take steps when told to."""

from __future__ import annotations

import gc
import logging
import time
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist

from megasnn.benchmark.pipeline import ONE_BATCH, ModelName, PipelineTask
from megasnn.comm.statistics import statistics
from megasnn.config import OptimizerConfig
from megasnn.engine import Engine
from megasnn.models.description import ModelDescription
from megasnn.models.spikformer.dimensions import PretrainSpikformerConfig, SpikformerConfig
from megasnn.models.spikformer.model import describe_spikformer
from megasnn.models.vgg_dvs.dimensions import PretrainVggDvsConfig
from megasnn.models.vgg_dvs.model import describe_vgg_dvs
from megasnn.optim import build_optimizer
from megasnn.parallel_state import initialize_model_parallel
from megasnn.pipeline.costs import PipelineCosts, agreed_costs, layers_per_chunk
from megasnn.pipeline.executor import MicroBatchInput
from megasnn.pipeline.p2p import WireOptions
from megasnn.pipeline.plan import PipelinePlan, PipelineRequest, plan_pipeline
from megasnn.schedule.build import chunks_of_schedule
from megasnn.schedule.forecast import idle_share
from megasnn.telemetry.memory import peak_memory_mb, release_free_memory, reset_peak_memory
from megasnn.training.setup import build_context, neuron_spec

OPTIMIZER = OptimizerConfig()
IMAGE_SIZES = {"spikformer_ti": 64, "spikformer_s": 64}  # the dimensions that MegaSNN's other benchmarks use


@dataclass(frozen=True)
class PipelineTurn:
    """Attributes: seconds of each step, and of its schedule alone; MB that the schedule needs above what is there."""

    step: list[float]
    schedule: list[float]
    peak_mb: float


def describe(model: ModelName) -> ModelDescription:
    if model == "vgg_dvs":
        vgg = PretrainVggDvsConfig()
        return describe_vgg_dvs(vgg.model, neuron_spec(vgg))
    sizes: dict[str, Any] = {"image_size": IMAGE_SIZES[model]} if model in IMAGE_SIZES else {}
    spikformer = PretrainSpikformerConfig(SpikformerConfig(variant=model, num_classes=10, **sizes))
    return describe_spikformer(spikformer.model, neuron_spec(spikformer))


class PipelineWorker:
    """`prepare` makes the engine of a row, the others take its name."""

    def __init__(self, task: PipelineTask) -> None:
        logging.getLogger("torch._library.triton").setLevel(logging.ERROR)  # warns wherever there is no GPU
        torch.set_num_threads(1)
        self._config, self._device = task.config, torch.device("cpu")
        if task.stages > 1:
            store = dist.FileStore(task.store, task.stages)
            dist.init_process_group("gloo", store=store, rank=task.rank, world_size=task.stages)
        self._state = initialize_model_parallel(1, task.stages, self._device)
        self._model = describe(task.model)
        self._context = build_context(self._state, "fp32", "auto")
        self._rows: dict[str, _Row] = {}
        self._costs: PipelineCosts | None = None

    def prepare(self, name: str) -> dict[str, Any]:
        """Builds the engine and takes two steps, the second with the traffic counted."""
        config = self._config
        count = 1 if name == ONE_BATCH else config.micro_batches
        if self._costs is None and self._state.pipeline.size > 1:
            self.measure_costs()
        row = self._rows[name] = _Row(self._plan(name, count), self, count)
        row.step()
        statistics.reset()
        statistics.enable()
        row.step()
        statistics.enable(False)
        return row.about(self._forward_ratio())

    def measure_costs(self) -> None:
        state, size = self._state, self._config.micro_batch_size
        self._costs = agreed_costs(self._model, size, self._context, self._device, state.world, state.pipeline)

    def measure(self, name: str, steps: int) -> PipelineTurn:
        row = self._rows[name]
        row.step()  # caches saw another row last
        gc.collect()
        peak = row.peak_of_schedule(self._device)
        timed = [row.step() for _ in range(steps)]
        return PipelineTurn([whole for whole, _ in timed], [schedule for _, schedule in timed], peak)

    def simulate(self, name: str) -> float:
        """Seconds of the schedule by the costs measured last."""
        row = self._rows[name]
        result = replace(row.plan, costs=self._costs).simulation(self._config.micro_batches)
        assert result is not None
        return result.makespan

    def _plan(self, name: str, count: int) -> PipelinePlan:
        schedule = name if self._state.pipeline.size > 1 else "1f1b"
        size = self._config.samples if name == ONE_BATCH else self._config.micro_batch_size
        request = PipelineRequest(schedule, chunks_of_schedule(schedule), None, None, size, (count,))
        return plan_pipeline(self._model, request, self._context, self._state, WireOptions(), self._costs)

    def build(self, plan: PipelinePlan) -> Engine:
        return Engine(self._model, self._state, self._context, plan.bounds, plan.schedules)

    def batch(self, engine: Engine, count: int) -> list[MicroBatchInput]:
        """The same random samples in every process."""
        model, samples = self._model, self._config.samples
        generator = torch.Generator().manual_seed(0)
        images = torch.randn((samples, *model.input_shape), generator=generator)
        labels = torch.randint(0, model.num_classes, (samples,), generator=generator)
        size = samples // count
        return [
            MicroBatchInput(
                images[first : first + size].clone() if engine.takes_images else None,
                labels[first : first + size].clone() if engine.gives_logits else None,
                size,
                range(first, first + size),
            )
            for first in range(0, samples, size)
        ]

    def _forward_ratio(self) -> float | None:
        """Bytes of activations that all stages send, as a part of what they take unpacked; None without stages."""
        mine = [t for (group, _, way), t in statistics.read().items() if (group, way) == ("pipeline", "forward")]
        sums = torch.tensor([sum(t.bytes for t in mine), sum(t.dense_bytes for t in mine)], dtype=torch.float64)
        if self._state.pipeline.size == 1:
            return None
        dist.all_reduce(sums)
        return (sums[0] / sums[1]).item()


class _Row:
    """One engine with its optimizer and its batch."""

    def __init__(self, plan: PipelinePlan, worker: PipelineWorker, count: int) -> None:
        self.plan, self._count = plan, count
        self._samples = worker._config.samples
        self.engine = worker.build(plan)
        self.optimizer = build_optimizer(self.engine.tensors, OPTIMIZER)
        self._batch = worker.batch(self.engine, count)

    def step(self) -> tuple[float, float]:
        """Seconds of a whole step, and of its schedule. All ranks begin together and end together."""
        engine = self.engine
        _together()
        start = time.perf_counter()
        engine.forward_backward(self._batch, self._samples)
        middle = time.perf_counter()
        engine.merge_statistics(self._count)
        engine.gradient_norm.clip(engine.gradient_norm(), OPTIMIZER.clip_grad)
        self.optimizer.step()
        _together()
        return time.perf_counter() - start, middle - start

    def peak_of_schedule(self, device: torch.device) -> float:
        """MB that a step's schedule needs above what is there before it; the step is not finished."""
        release_free_memory()
        reset_peak_memory(device)
        before = peak_memory_mb(device)
        self.engine.forward_backward(self._batch, self._samples)
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
            facts["bubble"] = idle_share(simulation)
            facts["peak_mb"] = [held / 1e6 for held in plan.peak_bytes(count)]
        return facts


def _together() -> None:
    if dist.is_initialized():
        dist.barrier()
