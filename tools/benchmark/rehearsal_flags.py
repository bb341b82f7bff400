"""What the rehearsal is asked, and what its ranks say."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from megasnn.comm.codec import Content
from megasnn.config.checks import above, at_least
from megasnn.schedule import Schedule, Simulation
from megasnn.schedule.named import AUTO, SCHEDULES
from megasnn.schedule.refine import NEVER, RECOMPUTE
from tools.benchmark.harness import Flags
from tools.benchmark.links import Links
from tools.benchmark.models import ModelName
from tools.benchmark.pipeline_flags import unknown_schedules
from tools.benchmark.queued_device import Moved
from tools.benchmark.sleeping import SleepingLayer

AMOUNTS = ("forward_ms", "input_gradient_ms", "weight_gradient_ms", "gradient_kb", "parameters_kb", "latency_ms")


@dataclass(frozen=True)
class RehearsalBenchmark(Flags):
    """Schedules beside their simulation, executed by ranks that sleep where they would compute, over links that take a
    stated time."""

    stages: int = 8
    """Pipeline ranks."""
    replicas: int = 1
    """Data parallel ranks of each stage, which reduce their gradients."""
    micro_batches: int = 8
    """Micro-batches of a step, in each replica."""
    schedules: tuple[str, ...] = (*SCHEDULES, AUTO)
    """By name; auto is the best that the search finds for these costs."""
    recompute: str = NEVER
    """As --recompute of a run."""
    use_distributed_optimizer: bool = False
    """As that of a run: gradients go to the owners of rows, and rows from there to all replicas."""
    weight_parallel_size: int = 1
    """Replicas that share one copy of the weights, which are gathered where they are used; as that of a run."""
    model: ModelName | None = None
    """Layers sleep as long as those of this model compute here, and send what those send; by default all are alike, as
    the next flags say."""
    micro_batch_size: int = 4
    """Samples in a micro-batch of the model."""
    layers: int = 16
    """Layers that are alike."""
    forward_ms: float = 10.0
    """Milliseconds of a layer's forward; as long again where it is computed again."""
    input_gradient_ms: float = 10.0
    """Milliseconds of the first part of its backward."""
    weight_gradient_ms: float = 10.0
    """Milliseconds of the second part."""
    gradient_kb: float = 512.0
    """KB (10^3 bytes) of its output in float32, and of the gradient of that."""
    content: Literal["dense", "counts", "spikes"] = "dense"
    """What the output is packed as on its way to the next stage."""
    parameters_kb: float = 1024.0
    """KB of its parameters."""
    latency_ms: float = 0.5
    """Milliseconds that a message takes on a link, whatever its size."""
    bandwidth: float = 100.0
    """MB (10^6 bytes) that a link carries in a second."""
    steps: int = 5
    """Timed steps of each schedule; the fastest counts, since what else the machine does only adds time."""
    pictures: Path | None = None
    """Folder for a picture of each schedule as it was simulated, and one as it was rehearsed, on one scale."""
    timeout: float = 600.0
    """Seconds that anything may take before the rehearsal gives up."""

    @property
    def links(self) -> Links:
        return Links(1e-3 * self.latency_ms, 1e-6 / self.bandwidth)

    def sleeping_layers(self) -> list[SleepingLayer]:
        """Those that are alike."""
        forward, inputs, weights = (
            1e-3 * each for each in (self.forward_ms, self.input_gradient_ms, self.weight_gradient_ms)
        )
        gradient, parameters = round(1e3 * self.gradient_kb), round(1e3 * self.parameters_kb)
        layer = SleepingLayer(forward, inputs, weights, forward, gradient, Content(self.content), parameters)
        return [layer] * self.layers

    def problems(self) -> list[str]:
        wrong = at_least(self, 1, "replicas", "micro_batches", "micro_batch_size", "layers", "steps")
        wrong += at_least(self, 2, "stages") + at_least(self, 0, *AMOUNTS) + above(self, 0, "bandwidth", "timeout")
        wrong += unknown_schedules(self.schedules)
        if not self.schedules:
            wrong.append("--schedules must name at least one")
        if self.recompute not in RECOMPUTE:
            wrong.append(f"--recompute: {self.recompute!r} is none; known: {', '.join(RECOMPUTE)}")
        if self.model is None and self.layers < self.stages:
            wrong.append(f"--layers {self.layers} are too few for --stages {self.stages}: one for each at least")
        if self.weight_parallel_size < 1 or self.replicas % self.weight_parallel_size:
            wrong.append(f"--weight-parallel-size {self.weight_parallel_size} must divide --replicas {self.replicas}")
        if self.use_distributed_optimizer and self.replicas == 1:
            wrong.append("--use-distributed-optimizer needs --replicas 2 or more, which rows are shared out to")
        return wrong


@dataclass(frozen=True)
class Prepared:
    """What is about to be executed, with its simulation in seconds; and the layers of each chunk, as a layout."""

    schedule: Schedule
    simulation: Simulation
    layout: str


@dataclass(frozen=True)
class RankStep:
    """A step on one rank.

    Attributes:
        stream: start and end of each action in the time of the stream that computes. clock: by the clock.
        moved: by its links; what the rank was doing is the place of an action, or that behind the last one.
    """

    stream: list[tuple[float, float]]
    clock: list[tuple[float, float]]
    moved: list[Moved]
