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

from megasnn.config.tool_flags import RecomputeName, ScheduleName, command_line
from megasnn.schedule import (
    AUTO,
    SCHEDULES,
    ChunkCost,
    format_actions,
    generate,
    per_stage,
    simulate,
)
from megasnn.schedule.draw import chart
from megasnn.schedule.passes import NEVER, RECOMPUTE, insert_recompute, refine

MOST = 1 << 13
MOST_SEARCHED = 128


@dataclass(frozen=True)
class Options:
    """Draw a pipeline schedule."""

    schedule: Annotated[ScheduleName, tyro.conf.Positional]
    """name of the schedule; auto is the fastest that a search finds."""
    stages: int = 4
    """pipeline ranks."""
    micro_batches: int = 8
    """micro-batches of a step."""
    num_virtual_stages_per_pipeline_rank: int | None = None
    """chunks on each rank; the schedule's own number when not given, 2 for interleaved."""
    units: int = 1
    """layers of each chunk, which are computed one by one."""
    recompute: RecomputeName = NEVER
    """which forwards of these layers are computed again for their backward."""
    forward: float = 1.0
    """time of a stage's forward."""
    input_grad: float = 1.0
    """time of a stage's input gradient."""
    weight_grad: float = 1.0
    """time of a stage's weight gradient."""
    transfer: float = 0.0
    """time of a transfer between two ranks."""
    actions: bool = False
    """also list every rank's actions, transfers included."""
    output: Path | None = None
    """write a Gantt chart here, .svg or .png."""


def main(arguments: Sequence[str] | None = None) -> None:
    options = command_line(Options, arguments)
    _check(options)
    whole = ChunkCost(options.forward, options.input_grad, options.weight_grad, options.transfer, options.transfer)
    costs_of = per_stage([whole] * options.stages)
    schedule = generate(
        options.schedule,
        options.stages,
        options.micro_batches,
        options.num_virtual_stages_per_pipeline_rank,
        costs_of,
    )
    if options.units > 1 or options.recompute != NEVER:
        wanted = RECOMPUTE[options.recompute]
        schedule = refine(schedule, [options.units] * schedule.chunks)
        schedule = insert_recompute(schedule, lambda unit, m: wanted(m, options.micro_batches))
    result = simulate(schedule, costs_of(schedule.placement))
    print(f"{schedule.name}: {schedule.ranks} stages, {schedule.micro_batches} micro-batches")
    print(f"makespan {result.makespan:g}")
    for rank in range(schedule.ranks):
        print(
            f"rank {rank}: idle {result.idle[rank]:g} (between first and last action {result.bubble[rank]:g}), "
            f"peak activations {result.peak_activations[rank]:g}, chunks {list(schedule.chunks_of(rank))}"
        )
    if options.actions:
        print(format_actions(schedule.actions))
    if options.output is not None:
        chart(schedule, result).savefig(options.output)
        print(f"drawn: {options.output}")


def _check(options: Options) -> None:
    if options.units < 1:
        raise ValueError(f"--units must be at least 1, got {options.units}")
    own = SCHEDULES[options.schedule].chunks if options.schedule in SCHEDULES else 1
    chunks = options.num_virtual_stages_per_pipeline_rank or own
    size = options.stages * options.micro_batches * chunks * options.units
    if size > MOST or options.schedule == AUTO and options.stages > MOST_SEARCHED:
        raise ValueError(
            f"--stages {options.stages} x --micro-batches {options.micro_batches} x chunks {chunks} x --units "
            f"{options.units} must be at most {MOST}, and --stages with auto {MOST_SEARCHED}: more takes minutes"
        )
    costs = options.forward, options.input_grad, options.weight_grad, options.transfer
    if not all(math.isfinite(cost) and cost >= 0 for cost in costs):
        given = " ".join(f"{cost:g}" for cost in costs)
        raise ValueError(
            f"--forward, --input-grad, --weight-grad and --transfer must be finite and not negative, got {given}"
        )
    if options.output is not None and options.output.suffix not in (".svg", ".png"):
        raise ValueError(f"--output {options.output}: the name must end in .svg or .png")
    if options.output is not None and not options.output.parent.is_dir():
        raise ValueError(f"--output {options.output}: there is no folder {options.output.parent}")


def program() -> int:
    """The program megasnn-draw-schedule."""
    try:
        main()
    except ValueError as error:
        print(f"draw_schedule: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(program())
