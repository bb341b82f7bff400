"""Gantt charts of simulated schedules, drawn with matplotlib."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from megasnn.common.files import quantity
from megasnn.schedule.actions import Kind, Schedule
from megasnn.schedule.simulate import Simulation, TimedAction
from megasnn.telemetry.pictures import pixels

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Light for the first half of the chunks and dark for the second half, if ranks hold several.
COLOURS = {
    Kind.FORWARD: ("#9ecae1", "#4292c6"),
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
WAITING_COLOUR = "#eeeeee"
# In rows of the vertical axis.
BAR = 0.8
GAP = 0.2
# In inches.
WIDTH = 12.0
ROW_HEIGHT = 0.36
MARGIN = 1.2
# Fractions of the width that a bar needs for the text of its action, and for its micro-batch alone.
FITS_ACTION = 0.025
FITS_MICRO_BATCH = 0.011


def raster(schedule: Schedule, simulation: Simulation, title: str) -> NDArray[np.uint8]:
    """Gantt chart in seconds as an image, uint8 `[height, width, 3]`."""
    return pixels(chart(schedule, simulation, title, 1e3, "ms"))


def chart(
    schedule: Schedule,
    simulation: Simulation,
    title: str = "",
    scale: float = 1.0,
    unit: str = "units of time",
) -> Figure:
    """Gantt chart with one row per rank.

    Args:
        scale: factor from simulated times to `unit`.
    """
    # Imported here, because training without pictures needs no matplotlib.
    from matplotlib.figure import Figure

    figure = Figure(figsize=(WIDTH, MARGIN + ROW_HEIGHT * schedule.ranks), layout="constrained")
    axes = figure.add_subplot()
    span = simulation.makespan or 1.0
    middles = []
    labels = []
    for rank, row in enumerate(simulation.timeline):
        axes.broken_barh([(0, span * scale)], (rank, BAR), facecolors=WAITING_COLOUR)
        _add_computations(axes, schedule, row, rank, span, scale)
        middles.append(rank + BAR / 2)
        labels.append(f"rank {rank}")
    axes.set_yticks(middles, labels)
    axes.set_ylim(schedule.ranks, -GAP)
    axes.set_xlim(0, span * scale)
    axes.set_xlabel(unit)
    caption = (
        f"{schedule.name}, {quantity(schedule.ranks, 'rank')}, "
        f"{quantity(schedule.micro_batches, 'micro-batch')}: makespan "
        f"{simulation.makespan * scale:.4g} {unit}, most activations on a rank: "
        f"{max(simulation.peak_activations):g} micro-batches of a whole stage"
    )
    if title:
        caption = f"{title}: {caption}"
    axes.set_title(caption, fontsize=9, loc="left")
    axes.spines[["top", "right", "left"]].set_visible(False)
    _add_legend(figure, schedule)
    return figure


def _add_computations(
    axes: Axes, schedule: Schedule, row: Sequence[TimedAction], top: float, span: float, scale: float
) -> None:
    for action, start, end in row:
        if action.kind not in COLOURS:
            continue
        light, dark = COLOURS[action.kind]
        in_second_half = action.segment >= (schedule.segments + 1) // 2
        colour = dark if schedule.segments > schedule.ranks and in_second_half else light
        bar = [(start * scale, (end - start) * scale)]
        axes.broken_barh(bar, (top, BAR), facecolors=colour, edgecolors="white", linewidth=0.4)
        width = (end - start) / span
        if width >= FITS_MICRO_BATCH:
            label = str(action) if width >= FITS_ACTION else str(action.micro_batch)
            axes.text((start + end) / 2 * scale, top + BAR / 2, label, ha="center", va="center", fontsize=6)


def _add_legend(figure: Figure, schedule: Schedule) -> None:
    from matplotlib.patches import Patch

    kinds: set[Kind] = set()
    for order in schedule.actions:
        kinds.update(action.kind for action in order)
    handles = [Patch(color=WAITING_COLOUR, label="waiting")]
    for kind, (light, dark) in COLOURS.items():
        if kind in kinds:
            handles.append(Patch(facecolor=light, edgecolor=dark, label=KIND_NAMES[kind]))
    if schedule.segments > schedule.ranks:
        handles.append(Patch(color="#888888", label="darker: second half of the chunks"))
    figure.legend(handles=handles, loc="outside lower center", ncols=min(len(handles), 7), fontsize=7, frameon=False)
