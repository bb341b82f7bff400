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
    Kind,
    Schedule,
    format_actions,
    generate,
    per_stage,
    simulate,
)
from megasnn.schedule.draw import draw_grid, write_chart
from megasnn.schedule.fsdp_passes import SharedWeights
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
    live_units: int = 0
    """layers of which a rank may hold gathered weights at the same time; 0: it has all weights, and gathers none."""
    gathered_ahead: int | None = None
    """layers that are gathered while one is computed; 1 when not given."""
    gather: float | None = None
    """time to gather a stage's weights, of which a layer takes its share; none when not given."""
    scatter: float | None = None
    """time to scatter a stage's gradients after each micro-batch; once a step, without time, when not given."""
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
    whole = ChunkCost(
        options.forward,
        options.input_grad + options.weight_grad,
        options.transfer,
        input_gradient=options.input_grad,
        weight_gradient=options.weight_grad,
        unshard=options.gather or 0.0,
        reduce_scatter=options.scatter or 0.0,
    )
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
    if options.live_units:
        units = range(schedule.chunks)
        scattered = frozenset(() if options.scatter is None else units)
        ahead = 1 if options.gathered_ahead is None else options.gathered_ahead
        schedule = SharedWeights((1,) * len(units), options.live_units, ahead, scattered).insert(schedule)
    wholes = [unit // options.units for unit in range(schedule.chunks)]
    result = simulate(schedule, costs_of(schedule.placement), wholes)
    print(f"{schedule.name}: {schedule.ranks} stages, {schedule.micro_batches} micro-batches")
    print(f"makespan {result.makespan:g}")
    for rank in range(schedule.ranks):
        print(
            f"rank {rank}: idle {result.idle[rank]:g} (between first and last action {result.bubble[rank]:g}), "
            f"peak activations {result.peak_activations[rank]:g}, chunks {list(schedule.chunks_of(rank))}"
            + (f", gathers {_gathers(schedule, rank)}" if options.live_units else "")
        )
    print(draw_grid(schedule, result))
    if options.actions:
        print(format_actions(schedule.actions))
    if options.output is not None:
        write_chart(schedule, result, options.output)
        print(f"drawn: {options.output}")


def _gathers(schedule: Schedule, rank: int) -> int:
    return sum(action.kind is Kind.UNSHARD for action in schedule.actions[rank])


def _check(options: Options) -> None:
    if options.units < 1:
        raise ValueError(f"--units must be at least 1, got {options.units}")
    if options.live_units < 0:
        raise ValueError(f"--live-units must not be negative, got {options.live_units}")
    of_gathers = {"gathered-ahead": options.gathered_ahead, "gather": options.gather, "scatter": options.scatter}
    without = [name for name, value in of_gathers.items() if value is not None]
    if without and not options.live_units:
        raise ValueError(f"--{without[0]} is for layers whose weights are gathered: give --live-units, at least 1")
    own = SCHEDULES[options.schedule].chunks if options.schedule in SCHEDULES else 1
    chunks = options.num_virtual_stages_per_pipeline_rank or own
    if options.stages * options.micro_batches * chunks * options.units > MOST:
        raise ValueError(
            f"--stages {options.stages} x --micro-batches {options.micro_batches} x "
            f"--num-virtual-stages-per-pipeline-rank {chunks} x --units {options.units} must be at most {MOST}: "
            f"more takes too long to find, and nobody could read it"
        )
    if options.schedule == AUTO and options.stages > MOST_SEARCHED:
        raise ValueError(
            f"--stages {options.stages}: auto searches for {MOST_SEARCHED} at most, since more would take minutes; "
            f"name a schedule"
        )
    computing = options.forward, options.input_grad, options.weight_grad
    costs = *computing, options.transfer, options.gather or 0.0, options.scatter or 0.0
    if not all(math.isfinite(cost) and cost >= 0 for cost in costs):
        given = " ".join(f"{cost:g}" for cost in costs)
        raise ValueError(
            f"--forward, --input-grad, --weight-grad, --transfer, --gather and --scatter must be finite and not "
            f"negative, got {given}"
        )
    if options.output is None:
        return
    if options.output.suffix not in (".svg", ".png"):
        raise ValueError(f"--output {options.output}: the name must end in .svg or .png")
    if not options.output.parent.is_dir():
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
