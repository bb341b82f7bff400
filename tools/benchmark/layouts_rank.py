"""One rank of a layout: prepares itself, tells its memory before the model exists, then takes steps when told to."""

from __future__ import annotations

import gc
import sys
import time
import warnings

import torch

from megasnn.free_memory import release_free_memory
from megasnn.kernels.spike_codec import Content, decode_into, encode
from megasnn.parallel.traffic import statistics
from megasnn.parallel_state import BACKENDS, destroy_model_parallel, initialize_model_parallel
from megasnn.telemetry.memory import peak_memory_mb, reset_peak_memory
from tools.benchmark.layouts_figures import Memory, Preparation, Turn
from tools.benchmark.layouts_flags import LayoutBenchmark
from tools.benchmark.layouts_rows import SPIKINGJELLY, Row
from tools.benchmark.models import tiny
from tools.benchmark.ranks import RankTask, join_ranks, set_up_rank
from tools.benchmark.training_steps import SpikingJellyStep, TrainingStep, counted_peak, megasnn_step

LayoutTask = RankTask[tuple[LayoutBenchmark, Row]]


class LayoutRank:
    """Imports everything and warms up caches and kernels when made; `prepare` builds the model."""

    def __init__(self, task: LayoutTask) -> None:
        set_up_rank(task)
        self._task = task
        self._flags, self._row = task.work
        self._device = _device(task)
        _warm_up(self._flags, self._device)
        self._baseline = _memory_now(self._device)
        self._warnings = 0

    def prepare(self) -> Preparation:
        """Builds the model and takes the warm-up steps, the last of them with the traffic counted."""
        self._work = self._build()
        self._steps(self._flags.warmup)
        with statistics.counting():
            self._steps(1)
        self._compiled_before, _ = _compiled()
        return Preparation(self._work.layout, self._loss, _traffic_by_group(), dict(self._work.setup_ms))

    def measure(self, steps: int) -> Turn:
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            self._steps(1)  # caches and branch predictors saw another row last
            turn = self._steps(steps)
        self._warnings += len(told)
        return turn

    def events(self) -> dict[str, int]:
        """What should not happen, or not again: warnings and recompiles in all turns, and breaks of graphs."""
        compiled, breaks = _compiled()
        return {"warnings": self._warnings, "recompiles": compiled - self._compiled_before, "graph_breaks": breaks}

    def memory(self) -> Memory:
        peak = peak_memory_mb(self._device)
        if self._row.library == SPIKINGJELLY:  # which gives its gradients back between steps
            return Memory(self._baseline, peak, None)
        return Memory(self._baseline, peak, counted_peak(self._work, self._device, self._task.ranks) / 1e6)

    def gpu(self) -> str | None:
        """Its name, where one is used."""
        return torch.cuda.get_device_name(self._device) if self._device.type == "cuda" else None

    def _build(self) -> TrainingStep:
        flags, row = self._flags, self._row
        model, samples = flags.dimensions(), flags.samples(row)
        if row.library == SPIKINGJELLY:
            return SpikingJellyStep(model, samples, flags.precision, self._device, row.compiled)
        self._join()
        return megasnn_step(
            model,
            samples,
            flags.micro_batch_size(row),
            flags.precision,
            flags.neuron_backend,
            sparse_products=flags.sparse_products,
            watches=True,
            tensor_model_parallel_size=row.tensor,
            pipeline_model_parallel_size=row.pipeline,
            context_parallel_size=row.context,
            context_parallel_cut=row.cut if row.context > 1 else "auto",
            use_distributed_optimizer=row.zero1,
            pipeline_schedule=flags.pipeline_schedule,
        )

    def _join(self) -> None:
        task, row = self._task, self._row
        if task.ranks > 1:
            join_ranks(task.store, task.rank, task.ranks, BACKENDS[self._device.type])
        initialize_model_parallel(row.tensor, row.pipeline, self._device, context_parallel_size=row.context)

    def _steps(self, count: int) -> Turn:
        turn = Turn([self._now()], [], [])
        for _ in range(count):
            self._loss = self._work.forward_backward()
            middle = self._now()
            self._work.update()
            turn.clock.append(self._now())
            turn.forward_backward.append(middle - turn.clock[-2])
            turn.update.append(turn.clock[-1] - middle)
            for name, milliseconds in self._work.phases_ms().items():
                turn.parts_ms.setdefault(name, []).append(milliseconds)
        return turn

    def _now(self) -> float:
        """One clock for all processes of a machine."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.monotonic()


def _device(task: LayoutTask) -> torch.device:
    flags, row = task.work
    if flags.device == "cpu":
        return torch.device("cpu")
    gpus = torch.cuda.device_count()
    if gpus < task.ranks:
        raise ValueError(f"--device cuda: row {row.name} has {task.ranks} rank(s), this machine {gpus} GPU(s)")
    torch.cuda.set_device(task.rank)
    return torch.device("cuda", task.rank)


def _warm_up(flags: LayoutBenchmark, device: torch.device) -> None:
    """A step of a tiny model in both libraries: lazy imports and compiled kernels belong to the baseline of memory."""
    model = tiny(flags.dimensions())
    initialize_model_parallel(device=device)
    works: list[TrainingStep] = [
        SpikingJellyStep(model, 2, flags.precision, device),
        megasnn_step(model, 2, 2, flags.precision, flags.neuron_backend),
    ]
    for work in works:
        work.forward_backward()
        work.update()
    destroy_model_parallel()
    dtype = torch.bfloat16 if flags.precision == "bf16" else torch.float32
    for content in Content:
        ones = torch.ones(16, dtype=dtype, device=device)
        decode_into(encode(ones, content, check=True), content, ones.view(1, -1))


def _memory_now(device: torch.device) -> float:
    gc.collect()
    release_free_memory()  # what the compiler has freed must not be there for the model to fill unseen
    reset_peak_memory(device)
    return peak_memory_mb(device)


def _compiled() -> tuple[int, int]:
    """Graphs that torch.compile has made in this process, and places where it could not go on."""
    dynamo = sys.modules.get("torch._dynamo.utils")  # importing it would take seconds
    if dynamo is None:
        return 0, 0
    return dynamo.counters["stats"]["unique_graphs"], sum(dynamo.counters["graph_break"].values())


def _traffic_by_group() -> dict[str, dict[str, float]]:
    result: dict[str, dict[str, float]] = {}
    for (group, _operation, _direction), traffic in statistics.read().items():
        sums = result.setdefault(group, {"calls": 0, "mb": 0.0, "dense_mb": 0.0})
        sums["calls"] += traffic.calls
        sums["mb"] += traffic.bytes / 1e6
        sums["dense_mb"] += traffic.dense_bytes / 1e6
    return result
