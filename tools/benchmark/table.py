"""A table as text, and the cells that tables of several cases have."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tools.benchmark.log import Line


def table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """
    Args:
        headings: of each column, of one or more lines.
        rows: the cells; the first column is flush left, the others are flush right.
    """
    lines = [heading.split("\n") for heading in headings]
    highest = max(map(len, lines))
    cells = [*zip(*([""] * (highest - len(each)) + each for each in lines), strict=True), *rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return "\n".join(
        "  ".join([row[0].ljust(widths[0]), *(cell.rjust(w) for cell, w in zip(row[1:], widths[1:], strict=True))])
        for row in cells
    )


def shown(value: float | None, digits: str = ".1f") -> str:
    """A figure; "-" where there is none."""
    return "-" if value is None else format(value, digits)


def with_extremes(figure: Mapping[str, float], digits: str = ".0f") -> str:
    """Median, least and most of a summary."""
    return f"{figure['median']:{digits}} ({figure['min']:{digits}}..{figure['max']:{digits}})"


def quartiles(figure: Mapping[str, float], digits: str) -> str:
    """The first and the third of a summary."""
    return f"{figure['q1']:{digits}}..{figure['q3']:{digits}}"


def change(line: Line, last: Line | None, *keys: str) -> str:
    """How much larger the figure under `keys` is than in the earlier line; "-" where there is nothing to compare."""
    now: Any = line
    before: Any = last
    for key in keys:
        now, before = now[key], before and before.get(key)
    return f"{now / before - 1:+.1%}" if before else "-"
