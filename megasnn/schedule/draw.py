"""Pictures of a simulated schedule, by matplotlib."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from megasnn.schedule.actions import Action, Kind, Schedule
from megasnn.schedule.simulate import Simulation, TimedAction
from megasnn.telemetry.pictures import pixels

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS = {
    Kind.FORWARD: ("#9ecae1", "#4292c6"),  # first half of the chunks, second half, where ranks hold several
    Kind.BACKWARD: ("#a1d99b", "#41ab5d"),
    Kind.INPUT_GRADIENT: ("#a1d99b", "#41ab5d"),
    Kind.WEIGHT_GRADIENT: ("#fdd0a2", "#fd8d3c"),
    Kind.RECOMPUTE: ("#dadaeb", "#9e9ac8"),
}
KIND_NAMES = {
    Kind.FORWARD: "forward",
    Kind.BACKWARD: "backward",
    Kind.INPUT_GRADIENT: "input gradient",
    Kind.WEIGHT_GRADIENT: "weight gradient",
    Kind.RECOMPUTE: "forward again",
}
WAITING = "#eeeeee"
BAR, GAP = 0.8, 0.2  # heights in the unit of the vertical axis
WIDTH, ROW_HEIGHT, AROUND = 12.0, 0.36, 1.2  # inches
WIDE, NARROW = 0.025, 0.011  # parts of the width that a bar needs for its action, and for its micro-batch alone


def raster(schedule: Schedule, simulation: Simulation, title: str) -> NDArray[np.uint8]:
    """Gantt chart of times in seconds as a picture, uint8 `[height, width, 3]`."""
    return pixels(chart(schedule, simulation, title, 1e3, "ms"))


def chart(
    schedule: Schedule,
    simulation: Simulation,
    title: str = "",
    scale: float = 1.0,
    unit: str = "units of time",
) -> Figure:
    """Gantt chart: a row for each rank.

    Args:
        title: beginning of the caption.
        scale, segment: factor for times, and their unit then.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(WIDTH, AROUND + ROW_HEIGHT * schedule.ranks), layout="constrained")
    axes = figure.add_subplot()
    span = simulation.makespan or 1.0
    for rank, row in enumerate(simulation.timeline):
        axes.broken_barh([(0, span * scale)], (rank, BAR), facecolors=WAITING)
        _add_computations(axes, schedule, row, rank, span, scale)
    axes.set_yticks([rank + BAR / 2 for rank in range(schedule.ranks)])
    axes.set_yticklabels([f"rank {rank}" for rank in range(schedule.ranks)])
    axes.set_ylim(schedule.ranks, -GAP)
    axes.set_xlim(0, span * scale)
    axes.set_xlabel(unit)
    axes.set_title(
        f"{title}{': ' if title else ''}{schedule.name}, {schedule.ranks} ranks, {schedule.micro_batches} "
        f"micro-batches: makespan {simulation.makespan * scale:.4g} {unit}, most activations on a rank: "
        f"{max(simulation.peak_activations):g} micro-batches of a whole stage",
        fontsize=9,
        loc="left",
    )
    axes.spines[["top", "right", "left"]].set_visible(False)
    _add_legend(figure, schedule)
    return figure


def _add_computations(
    axes: Axes, schedule: Schedule, row: Sequence[TimedAction], top: float, span: float, scale: float
) -> None:
    for action, start, end in row:
        if action.kind in COLOURS:
            colour, width = COLOURS[action.kind][_in_second_half(schedule, action)], (end - start) / span
            bar = [(start * scale, (end - start) * scale)]
            axes.broken_barh(bar, (top, BAR), facecolors=colour, edgecolors="white", linewidth=0.4)
            if width >= NARROW:
                label = str(action) if width >= WIDE else str(action.micro_batch)
                axes.text((start + end) / 2 * scale, top + BAR / 2, label, ha="center", va="center", fontsize=6)


def _add_legend(figure: Figure, schedule: Schedule) -> None:
    from matplotlib.patches import Patch

    kinds = {action.kind for row in schedule.actions for action in row}
    several = schedule.segments > schedule.ranks
    handles = [Patch(color=WAITING, label="waiting")]
    for kind, (light, dark) in COLOURS.items():
        if kind in kinds:
            handles.append(Patch(facecolor=light, edgecolor=dark, label=KIND_NAMES[kind]))
    handles += [Patch(color="#888888", label="darker: second half of the chunks")] * several
    figure.legend(handles=handles, loc="outside lower center", ncols=min(len(handles), 7), fontsize=7, frameon=False)


def _in_second_half(schedule: Schedule, action: Action) -> bool:
    return schedule.segments > schedule.ranks and action.segment >= (schedule.segments + 1) // 2
