"""The command line of the benchmark of plans, and the layouts that it knows."""

from __future__ import annotations

from dataclasses import dataclass

from megasnn.config import PretrainConfig, TrainingConfig
from megasnn.config.checks import above, at_least
from megasnn.grid import Grid
from megasnn.planner.layout import Layout
from tools.benchmark.harness import Flags
from tools.benchmark.models import configuration, dimensions_of
from tools.benchmark.pipeline_flags import ModelName
from tools.benchmark.training_steps import OPTIMIZER

RANKS = 2
LAYOUTS = {
    "one": Layout(Grid()),
    "one-always": Layout(Grid(), recompute="always"),
    "dp2": Layout(Grid(data=2)),
    "dp2-zero1": Layout(Grid(data=2), shards_optimizer=True),
    "wp2": Layout(Grid(weight=2)),
    "tp2": Layout(Grid(tensor=2)),
    "cp2": Layout(Grid(context=2)),
    "cp2rows": Layout(Grid(context=2), cut="rows"),
    "pp2-1f1b": Layout(Grid(pipeline=2)),
    "pp2-zb1p": Layout(Grid(pipeline=2), schedule="zb1p"),
    "pp2-zbv": Layout(Grid(pipeline=2), schedule="zbv", chunks=2),
    "pp2-always": Layout(Grid(pipeline=2), recompute="always"),
}


@dataclass(frozen=True)
class PlansBenchmark(Flags):
    """What the planner foresees, beside what two ranks take."""

    model: ModelName = "spikformer_cifar10"
    """As for --pipeline."""
    micro_batch_size: int = 4
    """Samples of a micro-batch."""
    micro_batches: int = 4
    """Of a step, over all replicas."""
    layouts: tuple[str, ...] = tuple(LAYOUTS)
    """Some of them."""
    rounds: int = 5
    """How often each layout has its turn."""
    steps: int = 1
    """Timed steps of a turn; two untimed ones come before them."""
    timeout: float = 300.0
    """Seconds that a turn may take before the benchmark gives up."""

    def problems(self) -> list[str]:
        wrong = at_least(self, 1, "micro_batch_size", "micro_batches", "rounds", "steps") + above(self, 0, "timeout")
        wrong += [f"--layouts {name}: known are {', '.join(LAYOUTS)}" for name in self.layouts if name not in LAYOUTS]
        for name in self.layouts:
            layout = LAYOUTS.get(name, Layout(Grid()))
            if layout.cut == "samples" and layout.grid.context > self.micro_batch_size > 0:
                wrong.append(
                    f"--micro-batch-size {self.micro_batch_size} is too small for {name}, where each of "
                    f"{layout.grid.context} ranks needs a sample: raise it, or leave {name} out of --layouts"
                )
        return wrong

    def configuration(self) -> PretrainConfig:
        """Of a run on one rank."""
        samples = self.micro_batch_size * self.micro_batches
        training = TrainingConfig(self.micro_batch_size, samples, train_iters=1)
        return configuration(dimensions_of(self.model), training=training, optimizer=OPTIMIZER)
