"""Pictures of a simulated schedule: characters for a terminal, matplotlib's SVG and PNG for everything else."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from megasnn.schedule.actions import Action, Kind, Schedule
from megasnn.schedule.simulate import Simulation, TimedAction

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
NAMES = {
    Kind.FORWARD: "forward",
    Kind.BACKWARD: "backward",
    Kind.INPUT_GRADIENT: "input gradient",
    Kind.WEIGHT_GRADIENT: "weight gradient",
    Kind.RECOMPUTE: "forward again",
}
WAITING = "#eeeeee"
BAR, GAP = 0.8, 0.2  # heights in the unit of the vertical axis
WIDTH, UNIT_HEIGHT, AROUND = 12.0, 0.36, 1.2  # inches
WIDE, NARROW = 0.025, 0.011  # parts of the width that a bar needs for its action, and for its micro-batch alone
SECONDS = (1e3, "ms")  # scale and unit of times in seconds


@dataclass(frozen=True)
class View:
    """Time axis of a chart.

    Attributes:
        span: time of the whole width, to compare charts; the makespan when None.
        scale, unit: factor for times, and their unit then.
        title: beginning of the caption.
    """

    span: float | None = None
    scale: float = 1.0
    unit: str = "units of time"
    title: str = ""


def draw_grid(schedule: Schedule, simulation: Simulation, columns: int = 160) -> str:
    """One line per rank, time to the right: each computation is its kind, then its micro-batch as far as there is room;
    a dot is waiting. Where ranks hold several chunks, the second half has lower case.

    The shortest computation has three characters, fewer where `columns` would not do.
    """
    computed = [[timed for timed in row if timed.action.kind in COLOURS] for row in simulation.timeline]
    lengths = [timed.end - timed.start for row in computed for timed in row if timed.end > timed.start]
    if not lengths:
        return ""
    scale = min(3 / min(lengths), columns / simulation.makespan)
    lines = []
    for rank, row in enumerate(computed):
        cells = ["."] * round(simulation.makespan * scale)
        for timed in row:
            first, end = round(timed.start * scale), round(timed.end * scale)
            kind = timed.action.kind.value
            label = f"{kind.lower() if _in_second_half(schedule, timed.action) else kind}{timed.action.micro_batch}"
            cells[first:end] = label[: end - first].ljust(end - first)
        lines.append(f"rank {rank} |{''.join(cells)}|")
    return "\n".join(lines)


def write_chart(schedule: Schedule, simulation: Simulation, path: Path, view: View = View()) -> None:  # noqa: B008
    """Writes the Gantt chart; the suffix says how, .svg or .png. Raises ValueError for another."""
    if path.suffix not in (".svg", ".png"):
        raise ValueError(f"--output {path}: the name must end in .svg or .png")
    if path.suffix == ".png":
        from PIL import Image

        # A palette: a third of the size.
        Image.fromarray(raster(schedule, simulation, view)).quantize(32).save(path, optimize=True)
        return
    from matplotlib import rc_context

    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "schedule"}):  # the same bytes in every run
        chart(schedule, simulation, view).savefig(path, metadata={"Date": None})


def raster(schedule: Schedule, simulation: Simulation, view: View = View()) -> NDArray[np.uint8]:  # noqa: B008
    """Gantt chart as a picture, uint8 `[height, width, 3]`."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    canvas = FigureCanvasAgg(chart(schedule, simulation, view))
    canvas.draw()
    return np.asarray(canvas.buffer_rgba())[..., :3].copy()


def chart(schedule: Schedule, simulation: Simulation, view: View = View()) -> Figure:  # noqa: B008  (frozen)
    """Gantt chart: a row for each rank."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(WIDTH, AROUND + UNIT_HEIGHT * schedule.ranks), layout="constrained")
    axes = figure.add_subplot()
    span = (simulation.makespan if view.span is None else view.span) or 1.0
    for rank, row in enumerate(simulation.timeline):
        axes.broken_barh([(0, span * view.scale)], (rank, BAR), facecolors=WAITING)
        _add_computations(axes, schedule, row, rank, span, view.scale)
    axes.set_yticks([rank + BAR / 2 for rank in range(schedule.ranks)])
    axes.set_yticklabels([f"rank {rank}" for rank in range(schedule.ranks)])
    axes.set_ylim(schedule.ranks, -GAP)
    axes.set_xlim(0, span * view.scale)
    axes.set_xlabel(view.unit)
    axes.set_title(_caption(schedule, simulation, view), fontsize=9, loc="left")
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
    several = schedule.chunks > schedule.ranks
    handles = [Patch(color=WAITING, label="waiting")]
    for kind, (light, dark) in COLOURS.items():
        if kind in kinds:
            handles.append(Patch(facecolor=light, edgecolor=dark, label=NAMES[kind]))
    handles += [Patch(color="#888888", label="darker: second half of the chunks")] * several
    figure.legend(handles=handles, loc="outside lower center", ncols=min(len(handles), 7), fontsize=7, frameon=False)


def _in_second_half(schedule: Schedule, action: Action) -> bool:
    return schedule.chunks > schedule.ranks and action.chunk >= (schedule.chunks + 1) // 2


def _caption(schedule: Schedule, simulation: Simulation, view: View) -> str:
    title = f"{view.title}: " if view.title else ""
    return (
        f"{title}{schedule.name}, {schedule.ranks} ranks, {schedule.micro_batches} micro-batches: makespan "
        f"{simulation.makespan * view.scale:.4g} {view.unit}, most activations on a rank: "
        f"{max(simulation.peak_activations):g} micro-batches of a whole stage"
    )
