"""The command line of the benchmark of capacity, and the sizes that may be tried."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from typing import Any, Literal

from megasnn.config.checks import above, at_least
from megasnn.models.spikformer.dimensions import Spikformer
from megasnn.planner.candidates import Prefer
from megasnn.planner.layout import Layout
from tools.benchmark.harness import Flags
from tools.benchmark.models import Dimensions, ModelName, dimensions_of
from tools.benchmark.two_ranks import LAYOUTS, RANKS, Run, unknown_layouts

Grows = Literal["micro-batch", "image-size", "depth"]
PLANS: dict[str, Prefer] = {"plan-speed": "speed", "plan-memory": "memory", "plan-capacity": "capacity"}
MOST_OF_MACHINE = 0.25  # a try may need more than what is asked for, and a process is more than its tensors


@dataclass(frozen=True)
class CapacityBenchmark(Flags):
    """The largest micro-batch, image or depth whose steps fit in a given memory, found by trying, and foreseen."""

    model: ModelName = "spikformer_cifar10"
    """As for --pipeline."""
    grows: Grows = "micro-batch"
    """What is made as large as possible; depth is of Spikformers."""
    memory: float = 200.0
    """MB that the tensors of each rank may take: weights, gradients, optimizer state, and what steps need."""
    layouts: tuple[str, ...] = ("one", "one-always", "dp2", "tp2", "cp2", "pp2-1f1b")
    """Of those that --plans has, or plan-speed, plan-memory, plan-capacity: what the planner takes for one rank and two
    with that --prefer, for --micro-batch-size."""
    micro_batch_size: int = 2
    """Samples of a micro-batch, where something else grows."""
    micro_batches: int = 4
    """Of a step, over all replicas."""
    most: int = 256
    """Of what grows."""
    timeout: float = 300.0
    """Seconds that a try may take before the benchmark gives up."""

    def problems(self) -> list[str]:
        wrong = at_least(self, 1, "micro_batch_size", "micro_batches", "most") + above(self, 0, "memory", "timeout")
        wrong += unknown_layouts(self.layouts, [*LAYOUTS, *PLANS])
        if self.grows == "depth" and not isinstance(dimensions_of(self.model), Spikformer):
            wrong.append(f"--grows depth: --model {self.model} has no blocks; take micro-batch or image-size")
        machine = 1e-6 * os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        if RANKS * self.memory > MOST_OF_MACHINE * machine:
            wrong.append(
                f"--memory {self.memory:g} for each of {RANKS} ranks: this machine has {machine:.0f} MB, of which "
                f"{MOST_OF_MACHINE:.0%} may be asked for; give {MOST_OF_MACHINE * machine / RANKS:.0f} or less"
            )
        if not wrong and (none := [name for name in self.layouts if name in LAYOUTS and not self.sizes(LAYOUTS[name])]):
            wrong.append(f"--most {self.most}: there is no {self.grows} up to that for {', '.join(none)}; raise it")
        return wrong

    def sizes(self, layout: Layout) -> list[int]:
        """What may be tried on a layout, in order: sizes that the model can have and the ranks can share."""
        return [size for size in range(1, self.most + 1) if self._can_be(size, layout)]

    def _can_be(self, size: int, layout: Layout) -> bool:
        if self.grows == "micro-batch":
            return layout.cut == "rows" or size % layout.grid.context == 0
        return not self._dimensions(size).problems(layout.grid.tensor)

    def _dimensions(self, size: int) -> Dimensions:
        grown: dict[Grows, dict[str, Any]] = {"image-size": {"image_size": size}, "depth": {"depth": size}}
        return replace(dimensions_of(self.model), **grown.get(self.grows, {}))

    def run(self, size: int) -> Run:
        """The run in which what grows has this size."""
        samples = size if self.grows == "micro-batch" else self.micro_batch_size
        return Run(self._dimensions(size), samples, self.micro_batches)

    def usual(self) -> Run:
        """The run in which nothing grows."""
        return Run(dimensions_of(self.model), self.micro_batch_size, self.micro_batches)
