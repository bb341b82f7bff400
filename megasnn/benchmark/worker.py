"""One rank of a row: prepares itself, tells its memory before the model exists, then takes steps when told to."""

from __future__ import annotations

import gc
import logging
import time
from dataclasses import dataclass

import torch
import torch.distributed as dist

from megasnn.benchmark.config import BenchmarkConfig
from megasnn.benchmark.models import tiny
from megasnn.benchmark.rows import SPIKINGJELLY
from megasnn.benchmark.task import RankTask
from megasnn.benchmark.workloads import MegaSNNStep, SpikingJellyStep, Workload
from megasnn.comm.codec import Wire, decode_into, encode
from megasnn.comm.statistics import statistics
from megasnn.parallel_state import ParallelState, destroy_model_parallel, initialize_model_parallel
from megasnn.telemetry.memory import peak_memory_mb, release_free_memory, reset_peak_memory


@dataclass(frozen=True)
class Preparation:
    """Attributes: pipeline layout, the last warm-up step's loss, and calls and bytes sent in one step by group."""

    layout: str
    loss: float
    traffic: dict[str, dict[str, float]]


@dataclass(frozen=True)
class Turn:
    """Attributes: the clock at the start and after each step in s, and seconds of each step's two parts."""

    clock: list[float]
    forward_backward: list[float]
    update: list[float]


@dataclass(frozen=True)
class Memory:
    """MB before the model was built, and at most since then."""

    baseline: float
    peak: float


class Worker:
    """Imports everything and warms up caches and kernels when made; `prepare` builds the model."""

    def __init__(self, task: RankTask) -> None:
        logging.getLogger("torch._library.triton").setLevel(logging.ERROR)  # warns wherever there is no GPU
        self._task = task
        torch.set_num_threads(task.row.threads)
        self._device = _device(task)
        _warm_up(task.config, self._device)
        self._baseline = _memory_now(self._device)

    def prepare(self) -> Preparation:
        """Builds the model and takes the warm-up steps, the last of them with the traffic counted."""
        self._work = self._build()
        self._steps(self._task.config.warmup)
        statistics.enable()
        self._steps(1)
        statistics.enable(False)
        return Preparation(self._work.layout, self._loss, _traffic_by_group())

    def measure(self, steps: int) -> Turn:
        self._steps(1)  # caches and branch predictors saw another row last
        return self._steps(steps)

    def memory(self) -> Memory:
        return Memory(self._baseline, peak_memory_mb(self._device))

    def gpu(self) -> str | None:
        """Its name, where one is used."""
        return torch.cuda.get_device_name(self._device) if self._device.type == "cuda" else None

    def _build(self) -> Workload:
        config, row = self._task.config, self._task.row
        model, samples = config.dimensions(), config.samples(row)
        if row.library == SPIKINGJELLY:
            return SpikingJellyStep(model, samples, config.precision, self._device)
        state = self._join()
        return MegaSNNStep(
            model,
            state,
            samples,
            config.micro_batch_size(row),
            config.precision,
            config.neuron_backend,
            config.pipeline_schedule,
        )

    def _join(self) -> ParallelState:
        row = self._task.row
        if row.ranks > 1:
            store = dist.FileStore(self._task.store, row.ranks)
            backend = "nccl" if self._device.type == "cuda" else "gloo"
            dist.init_process_group(backend, store=store, rank=self._task.rank, world_size=row.ranks)
        return initialize_model_parallel(row.tensor, row.pipeline, self._device)

    def _steps(self, count: int) -> Turn:
        turn = Turn([self._now()], [], [])
        for _ in range(count):
            self._loss = self._work.forward_backward()
            middle = self._now()
            self._work.update()
            turn.clock.append(self._now())
            turn.forward_backward.append(middle - turn.clock[-2])
            turn.update.append(turn.clock[-1] - middle)
        return turn

    def _now(self) -> float:
        """One clock for all processes of a machine."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.monotonic()


def _device(task: RankTask) -> torch.device:
    if task.config.device == "cpu":
        return torch.device("cpu")
    gpus = torch.cuda.device_count()
    if gpus < task.row.ranks:
        raise ValueError(f"--device cuda: row {task.row.name} has {task.row.ranks} rank(s), this machine {gpus} GPU(s)")
    torch.cuda.set_device(task.rank)
    return torch.device("cuda", task.rank)


def _warm_up(config: BenchmarkConfig, device: torch.device) -> None:
    """A step of a tiny model in both libraries: lazy imports and compiled kernels belong to the baseline of memory."""
    model = tiny(config.dimensions())
    state = initialize_model_parallel(device=device)
    works: list[Workload] = [
        SpikingJellyStep(model, 2, config.precision, device),
        MegaSNNStep(model, state, 2, 2, config.precision, config.neuron_backend, "auto"),
    ]
    for work in works:
        work.forward_backward()
        work.update()
    destroy_model_parallel()
    dtype = torch.bfloat16 if config.precision == "bf16" else torch.float32
    for wire in Wire:
        ones = torch.ones(16, dtype=dtype, device=device)
        decode_into(encode(ones, wire, check=True), wire, ones.view(1, -1))


def _memory_now(device: torch.device) -> float:
    gc.collect()
    release_free_memory()  # what the compiler has freed must not be there for the model to fill unseen
    reset_peak_memory(device)
    return peak_memory_mb(device)


def _traffic_by_group() -> dict[str, dict[str, float]]:
    result: dict[str, dict[str, float]] = {}
    for (group, _operation, _direction), traffic in statistics.read().items():
        sums = result.setdefault(group, {"calls": 0, "mb": 0.0, "dense_mb": 0.0})
        sums["calls"] += traffic.calls
        sums["mb"] += traffic.bytes / 1e6
        sums["dense_mb"] += traffic.dense_bytes / 1e6
    return result
