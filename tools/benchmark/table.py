"""A table as text."""

from __future__ import annotations

from collections.abc import Sequence
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


def change(line: Line, last: Line | None, *keys: str) -> str:
    """How much larger the figure under `keys` is than in the earlier line; "-" where there is nothing to compare."""
    now: Any = line
    before: Any = last
    for key in keys:
        now, before = now[key], before and before.get(key)
    return f"{now / before - 1:+.1%}" if before else "-"
