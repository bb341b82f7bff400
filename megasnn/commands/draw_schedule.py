"""Show a pipeline schedule: how long it takes, how long each rank waits, what it holds, and who does what when.

    megasnn-draw-schedule zbv --stages 4 --micro-batches 8
    megasnn-draw-schedule auto --stages 4 --micro-batches 8 --weight-grad 0.8 --output g.svg

Costs are for a whole stage and one micro-batch, in any unit of time; with v chunks on a rank a chunk costs a
v-th, a transfer always as much as given. Activations count whole stages' micro-batches.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from megasnn.commands.flags import ScheduleName, run_tool
from megasnn.schedule import ChunkCost, generate, per_stage, simulate
from megasnn.schedule.draw import chart


@dataclass(frozen=True)
class DrawOptions:
    """Draw a pipeline schedule."""

    schedule: Annotated[ScheduleName, tyro.conf.Positional]
    """name of the schedule; auto is the fastest that a search finds."""
    stages: int = 4
    """pipeline ranks."""
    micro_batches: int = 8
    """micro-batches of a step."""
    num_virtual_stages_per_pipeline_rank: int | None = None
    """chunks on each rank; the schedule's own number when not given, 2 for interleaved."""
    forward: float = 1.0
    """time of a stage's forward."""
    input_grad: float = 1.0
    """time of a stage's input gradient."""
    weight_grad: float = 1.0
    """time of a stage's weight gradient."""
    transfer: float = 0.0
    """time of a transfer between two ranks."""
    output: Path | None = None
    """write a Gantt chart here, .svg or .png."""


def draw(options: DrawOptions) -> None:
    """Prints and draws a schedule. Raises ValueError for what makes none."""
    costs = options.forward, options.input_grad, options.weight_grad, options.transfer
    if not all(0 <= cost < math.inf for cost in costs):
        raise ValueError(f"costs must be finite and not negative, got {' '.join(f'{cost:g}' for cost in costs)}")
    whole = ChunkCost(options.forward, options.input_grad, options.weight_grad, options.transfer, options.transfer)
    costs_of = per_stage([whole] * options.stages)
    schedule = generate(
        options.schedule,
        options.stages,
        options.micro_batches,
        options.num_virtual_stages_per_pipeline_rank,
        costs_of,
    )
    result = simulate(schedule, costs_of(schedule.placement))
    print(f"{schedule.name}: {schedule.ranks} stages, {schedule.micro_batches} micro-batches")
    print(f"makespan {result.makespan:g}")
    for rank in range(schedule.ranks):
        print(
            f"rank {rank}: idle {result.idle[rank]:g} (between first and last action {result.bubble[rank]:g}), "
            f"peak activations {result.peak_activations[rank]:g}, chunks {list(schedule.segments_of(rank))}"
        )
    if options.output is not None:
        chart(schedule, result).savefig(options.output)
        print(f"drawn: {options.output}")


def main(arguments: Sequence[str] | None = None) -> int:
    return run_tool("draw_schedule", lambda: draw(tyro.cli(DrawOptions, args=arguments)))


if __name__ == "__main__":
    sys.exit(main())
