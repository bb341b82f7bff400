"""Pictures of a plan: the timeline of its step, and the time of a step against the number of devices."""

from __future__ import annotations

from collections.abc import Sequence
from math import log
from pathlib import Path

from megasnn.planner.candidates import Candidate
from megasnn.planner.plan import Plan
from megasnn.schedule.draw import SECONDS, View, write_chart

WIDTH, HEIGHT, LEFT, FOOT, TOP = 720, 360, 80, 48, 28


def draw(plan: Plan, path: Path) -> list[Path]:
    """Draws both; the second one beside the first, with "-ranks.svg" in place of its suffix.

    Args:
        path: ends in .svg or .png.
    """
    scale, unit = SECONDS
    predicted = plan.predicted
    write_chart(
        predicted.schedule,
        predicted.simulation,
        path,
        View(scale=scale, unit=unit, title=f"one replica of {plan.layout}"),
    )
    against = path.with_name(f"{path.stem}-ranks.svg")
    against.write_text(time_against_ranks(plan), encoding="utf-8")
    return [path, against]


def fastest(plan: Plan) -> dict[int, Candidate]:
    """Of each number of devices, the candidate that takes least and fits: a simulated one where there is one."""
    found: dict[int, Candidate] = {}
    for each in plan.candidates:
        fits = each.seconds is not None and each.bytes is not None and each.bytes <= plan.cluster.machine.memory
        best = found.get(each.layout.ranks)
        if fits and (best is None or (not each.simulated, _rank(each)) < (not best.simulated, _rank(best))):
            found[each.layout.ranks] = each
    return dict(sorted(found.items()))


def _rank(each: Candidate) -> float:
    return each.seconds if each.seconds is not None else float("inf")


def time_against_ranks(plan: Plan) -> str:
    """An SVG, both axes logarithmic in powers of two; the dashed line is what one device's time divided by their number
    would be."""
    best = fastest(plan)
    ranks, seconds = list(best), [_rank(each) for each in best.values()]
    ideal = [seconds[0] * ranks[0] / each for each in ranks]
    low, high = min(*seconds, *ideal), max(seconds)

    def x(count: int) -> float:
        return LEFT + (WIDTH - LEFT - 24) * _share(count, ranks[0], ranks[-1])

    def y(time: float) -> float:
        return TOP + (HEIGHT - TOP - FOOT) * (1 - _share(time, low, high))

    def line(times: Sequence[float], style: str) -> str:
        points = " ".join(f"{x(count):.1f},{y(time):.1f}" for count, time in zip(ranks, times, strict=True))
        return f'<polyline points="{points}" fill="none" {style}/>'

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{HEIGHT}" font-family="sans-serif" '
        'font-size="11"><rect width="100%" height="100%" fill="white"/>',
        f'<text x="{LEFT}" y="16">seconds of a step by number of devices; circles: simulated, others: bounds; dashed: '
        "as fast as many times one</text>",
        line(ideal, 'stroke="#999999" stroke-dasharray="4"'),
        line(seconds, 'stroke="#4292c6" stroke-width="2"'),
    ]
    for count, each, time in zip(ranks, best.values(), seconds, strict=True):
        fill = "#4292c6" if each.simulated else "white"
        parts.append(
            f'<g><title>{each.layout}: {time:.4g} s</title><circle cx="{x(count):.1f}" cy="{y(time):.1f}" r="4" '
            f'fill="{fill}" stroke="#4292c6"/></g><text x="{x(count) - 8:.1f}" y="{HEIGHT - FOOT + 20}">{count}</text>'
        )
        parts.append(f'<text x="4" y="{y(time) + 4:.1f}">{time:.4g} s</text>')
    return "\n".join([*parts, "</svg>"])


def _share(value: float, low: float, high: float) -> float:
    """Where a value is between two others, by its logarithm."""
    return log(value / low) / log(high / low) if high > low else 0.5
