"""What the benchmark of schedules is asked, and what its ranks say."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from megasnn.config.checks import above, at_least
from megasnn.schedule.named import AUTO, SCHEDULES
from tools.benchmark.harness import Flags
from tools.benchmark.models import ModelName

ONE_BATCH = "one batch"  # a single rank that takes all samples in one go
ONE_RANK = "one rank"  # a single rank with the pipeline's micro-batches: it computes the same function
SINGLE = (ONE_BATCH, ONE_RANK)


@dataclass(frozen=True)
class PipelineBenchmark(Flags):
    """Every schedule on a pipeline of ranks with one thread each."""

    models: tuple[ModelName, ...] = ("spikformer_cifar10", "vgg_dvs")
    """Each is measured by itself, one after the other."""
    stages: int = 2
    """Pipeline ranks."""
    micro_batches: int = 8
    """Micro-batches of a step."""
    micro_batch_size: int = 4
    """Samples in each."""
    schedules: tuple[str, ...] = (*SCHEDULES, AUTO)
    """By name; auto is the best that the search finds for the measured costs."""
    rounds: int = 5
    """How often each schedule has its turn."""
    steps: int = 1
    """Timed steps of a turn; one untimed step comes before them."""
    device: Literal["cpu", "cuda"] = "cpu"
    """cuda needs a GPU for each stage."""
    timeout: float = 600.0
    """Seconds that anything may take before the benchmark gives up."""

    @property
    def samples(self) -> int:
        return self.micro_batches * self.micro_batch_size

    def problems(self) -> list[str]:
        wrong = at_least(self, 1, "micro_batches", "micro_batch_size", "rounds", "steps") + at_least(self, 2, "stages")
        wrong += above(self, 0, "timeout")
        wrong += unknown_schedules(self.schedules)
        if not self.schedules or not self.models:
            wrong.append("--schedules and --models must name at least one")
        return wrong


def unknown_schedules(names: Sequence[str]) -> list[str]:
    """What is wrong with --schedules."""
    unknown = [name for name in names if name not in SCHEDULES.choices]
    return [f"--schedules: {name!r} is none; known: {', '.join(SCHEDULES.choices)}" for name in unknown]


@dataclass(frozen=True)
class PipelineTurn:
    """Attributes: seconds of each step, and of its schedule alone; MB that the schedule needs above what is there."""

    step: list[float]
    schedule: list[float]
    peak_mb: float


@dataclass
class Measured:
    """Of one row. `turns`: one entry per round, with what each rank says; `simulated`: seconds by the round's costs."""

    about: list[dict[str, Any]] = field(default_factory=list)
    turns: list[list[PipelineTurn]] = field(default_factory=list)
    simulated: list[float] = field(default_factory=list)
