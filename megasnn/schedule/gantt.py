"""Pictures of a simulated schedule: characters for a terminal, SVG and PNG for everything else."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from megasnn.schedule.actions import Action, Kind, Schedule
from megasnn.schedule.memory import weights_held
from megasnn.schedule.simulate import Simulation, TimedAction

if TYPE_CHECKING:
    from PIL import Image

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
LANE_COLOURS = {
    Kind.GATHER_WEIGHTS: "#f768a1",
    Kind.FREE_WEIGHTS: "#fcc5c0",  # from when they are there until then
    Kind.SCATTER_GRADIENTS: "#8c6d31",
}
LANE_NAMES = {
    Kind.GATHER_WEIGHTS: "gathering weights",
    Kind.FREE_WEIGHTS: "gathered",
    Kind.SCATTER_GRADIENTS: "scattering",
}
WAITING = "#eeeeee"
LEFT, HEAD, ROW, BAR, LANE, WIDTH, FOOT = 64, 24, 34, 28, 13, 1200, 52
SECONDS = (1e3, "ms")  # what times in seconds are shown in


@dataclass(frozen=True)
class Box:
    """A rectangle in the picture, in pixels. action: what it shows; None in the legend and for waiting ranks."""

    left: float
    top: float
    width: float
    height: float
    colour: str
    action: Action | None = None


@dataclass(frozen=True)
class Label:
    """A text in the picture; `left` and `top` of its first letter in pixels."""

    left: float
    top: float
    text: str


@dataclass(frozen=True)
class View:
    """How a chart shows time.

    Attributes:
        span: the time that the whole width stands for, to compare charts; the makespan when None.
        scale, unit: what a time is multiplied with, and what it is then called.
        title: comes first in the caption.
    """

    span: float | None = None
    scale: float = 1.0
    unit: str = "units of time"
    title: str = ""


def draw_grid(schedule: Schedule, simulation: Simulation, columns: int = 160) -> str:
    """One line per rank, time to the right: each computation is its kind, then its micro-batch as far as
    there is room; a dot is waiting. Where ranks hold several chunks, the second half has lower case.

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
    if path.suffix == ".svg":
        path.write_text(svg(schedule, simulation, view), encoding="utf-8")
    elif path.suffix == ".png":
        raster(schedule, simulation, view).save(path)
    else:
        raise ValueError(f"--output {path}: the name must end in .svg or .png")


def svg(schedule: Schedule, simulation: Simulation, view: View = View()) -> str:  # noqa: B008  (frozen)
    """The chart; pointing at a bar shows its action."""
    width, height = _size(schedule)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        f'font-family="sans-serif" font-size="11">',
        f'<rect width="100%" height="{height}" fill="white"/>',
    ]
    boxes, labels = _shapes(schedule, simulation, view)
    for box in boxes:
        rectangle = (
            f'<rect x="{box.left:.2f}" y="{box.top}" width="{box.width:.2f}" height="{box.height}" '
            f'fill="{box.colour}" stroke="{_edge(box)}" stroke-width="0.5"/>'
        )
        parts.append(rectangle if box.action is None else f"<g><title>{box.action}</title>{rectangle}</g>")
    for label in labels:
        # SVG places a text by its base line.
        parts.append(f'<text x="{label.left:.2f}" y="{label.top + 10}" pointer-events="none">{label.text}</text>')
    return "\n".join([*parts, "</svg>"])


def raster(schedule: Schedule, simulation: Simulation, view: View = View()) -> Image.Image:  # noqa: B008  (frozen)
    """The chart as an RGB picture."""
    from PIL import Image, ImageDraw  # only a picture needs it

    image = Image.new("RGB", _size(schedule), "white")
    pen = ImageDraw.Draw(image)
    boxes, labels = _shapes(schedule, simulation, view)
    for box in boxes:
        corners = (box.left, box.top, box.left + box.width, box.top + box.height)
        pen.rectangle(corners, fill=box.colour, outline=_edge(box))
    for label in labels:
        pen.text((label.left, label.top), label.text, fill="black")
    return image


def _edge(box: Box) -> str:
    return box.colour if box.action is None else "white"


def _size(schedule: Schedule) -> tuple[int, int]:
    return LEFT + WIDTH + 24, HEAD + (ROW + LANE * _lanes(schedule)) * schedule.ranks + FOOT


def _lanes(schedule: Schedule) -> int:
    """How many lanes there are below the computations of each rank: one for each unit whose weights it has gathered at
    the same time, and one for gradients."""
    each_one = [1] * schedule.chunks
    weights = max(max(weights_held(schedule, rank, each_one), default=0) for rank in range(schedule.ranks))
    return weights + any(action.kind is Kind.SCATTER_GRADIENTS for row in schedule.actions for action in row)


def _shapes(schedule: Schedule, simulation: Simulation, view: View) -> tuple[list[Box], list[Label]]:
    """All of the chart: caption, a row for each rank, an axis of time, and what the colours mean."""
    span = (simulation.makespan if view.span is None else view.span) or 1.0
    labels = [Label(LEFT, 6, _caption(schedule, simulation, view))]
    boxes, lanes = [], _lanes(schedule)
    height = ROW + LANE * lanes
    for rank, row in enumerate(simulation.timeline):
        top = HEAD + height * rank
        labels.append(Label(4, top + 8, f"rank {rank}"))
        boxes.append(Box(LEFT, top, WIDTH, BAR, WAITING))
        for timed in row:
            if timed.action.kind not in COLOURS:
                continue
            colour = COLOURS[timed.action.kind][_in_second_half(schedule, timed.action)]
            width = (timed.end - timed.start) * WIDTH / span
            box = Box(LEFT + timed.start * WIDTH / span, top, width, BAR, colour, timed.action)
            boxes.append(box)
            if width >= 12:
                labels.append(Label(box.left + 2, top + 8, _label(timed.action, width)))
        _add_lanes(row, lanes, top + BAR + 1, WIDTH / span, boxes, labels)
    bottom = HEAD + height * schedule.ranks
    for time in _ticks(span * view.scale):
        left = LEFT + time / view.scale * WIDTH / span
        boxes.append(Box(left, bottom - 4, 1, 6, "#444444"))
        labels.append(Label(left - 3, bottom + 2, f"{time:g}"))
    labels.append(Label(4, bottom + 2, view.unit if len(view.unit) < 8 else "time"))
    _add_legend(schedule, bottom + 26, boxes, labels)
    return boxes, labels


def _add_lanes(
    row: Sequence[TimedAction], lanes: int, top: float, scale: float, boxes: list[Box], labels: list[Label]
) -> None:
    """A rank's gathered weights, each in the first lane that is free, and in the last lane its gradients.

    Args:
        lanes: their number. scale: pixels for a unit of time.
    """
    used: dict[int, tuple[int, float]] = {}  # lane of a unit, and since when its weights are there

    def add(lane: int, start: float, end: float, action: Action) -> None:
        place = LEFT + start * scale, top + lane * LANE
        boxes.append(Box(*place, (end - start) * scale, LANE - 1, LANE_COLOURS[action.kind], action))
        if (end - start) * scale >= 12:
            labels.append(Label(place[0] + 2, place[1], str(action.chunk)))

    for action, start, end in row:
        if action.kind is Kind.GATHER_WEIGHTS:
            taken = {lane for lane, _ in used.values()}
            lane = min(set(range(lanes)) - taken)
            used[action.chunk] = lane, end
            add(lane, start, end, action)
        elif action.kind is Kind.FREE_WEIGHTS:
            lane, since = used.pop(action.chunk)
            add(lane, since, start, action)
        elif action.kind is Kind.SCATTER_GRADIENTS:
            add(lanes - 1, start, end, action)


def _add_legend(schedule: Schedule, top: float, boxes: list[Box], labels: list[Label]) -> None:
    kinds = {action.kind for row in schedule.actions for action in row}
    halves = schedule.chunks > schedule.ranks
    entries = [(WAITING, "waiting")]
    for kind, (light, dark) in COLOURS.items():
        if kind in kinds:
            entries += [(light, ""), (dark, NAMES[kind])] if halves else [(light, NAMES[kind])]
    entries += [(colour, LANE_NAMES[kind]) for kind, colour in LANE_COLOURS.items() if kind in kinds]
    left = float(LEFT)
    for colour, text in entries:
        boxes.append(Box(left, top, 14, 12, colour))
        labels.append(Label(left + 18, top, text))
        left += 36 + 6.2 * len(text) if text else 15
    dark_ones = "; darker: second half of the chunks" if halves else ""
    labels.append(Label(left, top, f"labels: chunk, kind, micro-batch, or the micro-batch alone{dark_ones}"))


def _ticks(whole: float) -> list[float]:
    """Five to ten round numbers from 0 to `whole`."""
    step = 10.0 ** math.floor(math.log10(whole))
    step = next(each for each in (step, step / 2, step / 5, step / 10) if whole / each >= 5)
    return [round(index * step, 12) for index in range(int(whole / step + 1e-9) + 1)]


def _in_second_half(schedule: Schedule, action: Action) -> bool:
    return schedule.chunks > schedule.ranks and action.chunk >= (schedule.chunks + 1) // 2


def _label(action: Action, width: float) -> str:
    return str(action) if width >= 30 else str(action.micro_batch)


def _caption(schedule: Schedule, simulation: Simulation, view: View) -> str:
    title = f"{view.title}: " if view.title else ""
    return (
        f"{title}{schedule.name}, {schedule.ranks} ranks, {schedule.micro_batches} micro-batches: makespan "
        f"{simulation.makespan * view.scale:.4g} {view.unit}, most activations on a rank: "
        f"{max(simulation.peak_activations):g} micro-batches of a whole stage"
    )
