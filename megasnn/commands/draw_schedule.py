"""Simulate a pipeline schedule: time of a step, idle time and activations of each rank, and a Gantt chart.

    megasnn-draw-schedule zbv --stages 4 --micro-batches 8
    megasnn-draw-schedule auto --stages 4 --micro-batches 8 --weight-grad 0.8 --output g.svg

Costs are for a whole stage and one micro-batch, in any unit of time. With v chunks on a rank each chunk costs 1/v; a
transfer costs the same for every v. Activations are in micro-batches of a whole stage.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated

import tyro

from megasnn.commands.flags import ScheduleName, run_tool
from megasnn.common.files import quantity
from megasnn.schedule import ChunkCost, chunk_costs, generate, simulate
from megasnn.schedule.draw import chart


@dataclass(frozen=True)
class DrawOptions:
    """Draw a pipeline schedule."""

    schedule: Annotated[ScheduleName, tyro.conf.Positional]
    """Schedule; auto searches for the fastest."""
    stages: int = 4
    """Pipeline ranks."""
    micro_batches: int = 8
    """Micro-batches of a step."""
    num_virtual_stages_per_pipeline_rank: int | None = None
    """Chunks on each rank. By default 2 for interleaved and the V schedules, otherwise 1."""
    forward: float = 1.0
    """Time of a stage's forward."""
    input_grad: float = 1.0
    """Time of a stage's input gradient."""
    weight_grad: float = 1.0
    """Time of a stage's weight gradient."""
    transfer: float = 0.0
    """Time of a transfer between two ranks."""
    output: Path | None = None
    """File for a Gantt chart, .svg or .png."""


def draw(options: DrawOptions) -> None:
    """Prints and draws a schedule. Raises ValueError for impossible sizes or costs."""
    for flag in ("forward", "input_grad", "weight_grad", "transfer"):
        cost = getattr(options, flag)
        if not 0 <= cost < math.inf:
            raise ValueError(f"--{flag.replace('_', '-')} {cost:g}: a cost must be finite and not negative")
    stage = ChunkCost(options.forward, options.input_grad, options.weight_grad, options.transfer, options.transfer)
    costs_of = partial(chunk_costs, [stage] * options.stages)
    schedule = generate(
        options.schedule,
        options.stages,
        options.micro_batches,
        options.num_virtual_stages_per_pipeline_rank,
        costs_of,
    )
    result = simulate(schedule, costs_of(schedule.placement))
    print(f"{schedule.name}: {quantity(schedule.ranks, 'stage')}, {quantity(schedule.micro_batches, 'micro-batch')}")
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
