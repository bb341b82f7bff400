"""Pictures of a simulated schedule: characters for a terminal, SVG and PNG for everything else."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from megasnn.schedule.actions import Action, Kind, Schedule
from megasnn.schedule.simulate import Simulation

if TYPE_CHECKING:
    from PIL import Image

COLOURS = {
    Kind.FORWARD: ("#9ecae1", "#4292c6"),  # first half of the chunks, second half, where ranks hold several
    Kind.BACKWARD: ("#a1d99b", "#41ab5d"),
    Kind.INPUT_GRADIENT: ("#a1d99b", "#41ab5d"),
    Kind.WEIGHT_GRADIENT: ("#fdd0a2", "#fd8d3c"),
}
LEFT, ROW, BAR, WIDTH, FOOT = 64, 34, 28, 1200, 24


@dataclass(frozen=True)
class Box:
    """A computation in the picture, in pixels."""

    left: float
    top: float
    width: float
    colour: str
    action: Action


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


def write_chart(schedule: Schedule, simulation: Simulation, path: Path) -> None:
    """Writes the Gantt chart; the suffix says how, .svg or .png. Raises ValueError for another."""
    if path.suffix == ".svg":
        path.write_text(svg(schedule, simulation), encoding="utf-8")
    elif path.suffix == ".png":
        raster(schedule, simulation).save(path)
    else:
        raise ValueError(f"--output {path}: the name must end in .svg or .png")


def svg(schedule: Schedule, simulation: Simulation) -> str:
    """The chart; pointing at a bar shows its action."""
    height = ROW * schedule.ranks + FOOT
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{LEFT + WIDTH + 8}" height="{height}" '
        f'font-family="sans-serif" font-size="11">',
        f'<rect width="100%" height="{height}" fill="white"/>',
    ]
    for rank in range(schedule.ranks):
        parts.append(f'<text x="4" y="{ROW * rank + 20}">rank {rank}</text>')
        parts.append(f'<rect x="{LEFT}" y="{ROW * rank + 2}" width="{WIDTH}" height="{BAR}" fill="#eeeeee"/>')
    for box in _boxes(schedule, simulation):
        parts.append(
            f'<g><title>{box.action}</title><rect x="{box.left:.2f}" y="{box.top}" width="{box.width:.2f}" '
            f'height="{BAR}" fill="{box.colour}" stroke="white" stroke-width="0.5"/>'
        )
        if box.width >= 12:
            parts.append(f'<text x="{box.left + 2:.2f}" y="{box.top + 18}">{_label(box)}</text>')
        parts.append("</g>")
    parts.append(f'<text x="{LEFT}" y="{height - 8}">{_caption(schedule, simulation)}</text></svg>')
    return "\n".join(parts)


def raster(schedule: Schedule, simulation: Simulation, span: float | None = None, title: str = "") -> Image.Image:
    """The chart as an RGB picture.

    Args:
        span: the time that the whole width stands for, to compare charts; the makespan when not given.
        title: comes before the caption.
    """
    from PIL import Image, ImageDraw  # only a picture needs it

    height = ROW * schedule.ranks + FOOT
    image = Image.new("RGB", (LEFT + WIDTH + 8, height), "white")
    pen = ImageDraw.Draw(image)
    for rank in range(schedule.ranks):
        pen.text((4, ROW * rank + 10), f"rank {rank}", fill="black")
        pen.rectangle((LEFT, ROW * rank + 2, LEFT + WIDTH, ROW * rank + 2 + BAR), fill="#eeeeee")
    for box in _boxes(schedule, simulation, span):
        corners = (box.left, box.top, box.left + box.width, box.top + BAR)
        pen.rectangle(corners, fill=box.colour, outline="white")
        if box.width >= 12:
            pen.text((box.left + 2, box.top + 8), _label(box), fill="black")
    pen.text((LEFT, height - 18), title + _caption(schedule, simulation), fill="black")
    return image


def _boxes(schedule: Schedule, simulation: Simulation, span: float | None = None) -> Iterator[Box]:
    whole = simulation.makespan if span is None else span
    scale = WIDTH / whole if whole else 0.0
    for rank, row in enumerate(simulation.timeline):
        for timed in row:
            if timed.action.kind in COLOURS:
                colour = COLOURS[timed.action.kind][_in_second_half(schedule, timed.action)]
                width = (timed.end - timed.start) * scale
                yield Box(LEFT + timed.start * scale, ROW * rank + 2, width, colour, timed.action)


def _in_second_half(schedule: Schedule, action: Action) -> bool:
    return schedule.chunks > schedule.ranks and action.chunk >= (schedule.chunks + 1) // 2


def _label(box: Box) -> str:
    return str(box.action) if box.width >= 30 else str(box.action.micro_batch)


def _caption(schedule: Schedule, simulation: Simulation) -> str:
    return (
        f"{schedule.name}, {schedule.ranks} ranks, {schedule.micro_batches} micro-batches: "
        f"makespan {simulation.makespan:g}, most activations {max(simulation.peak_activations):g}"
    )
