"""Earlier rows of a benchmark's log, and the comparison of new rows with them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


def read_log(path: Path) -> list[dict[str, Any]]:
    """Rows of a log, in the order of the file; none without a file. Raises ValueError for a line that is no row."""
    if not path.exists():
        return []
    rows = []
    for number, line in enumerate(path.read_text().splitlines(), 1):
        try:
            row = json.loads(line)
        except ValueError:
            row = None
        if not isinstance(row, dict):
            raise ValueError(f"--output {path}: line {number} is no row of JSON; remove the line, or give another file")
        rows.append(row)
    return rows


def compare(rows: Sequence[dict[str, Any]], earlier: Sequence[Mapping[str, Any]], figure: str) -> None:
    """Adds to each row now / then of a figure, with time and commit of the latest earlier row of its configuration."""
    latest = {_identity(row): row for row in earlier if _has_figure(row, figure)}
    for row in rows:
        then = latest.get(_identity(row))
        if then is not None:
            row["x_earlier"] = _middle(row[figure]) / _middle(then[figure])
            row["earlier"] = {"time": then.get("time"), "commit": then.get("commit")}


def compared_with(rows: Sequence[Mapping[str, Any]]) -> str:
    """Times and commits of the rows that `compare` has found; "" for none."""
    found = [row["earlier"] for row in rows if "earlier" in row]
    texts = [f"the run of {each['time']} at {each['commit'] or 'no commit'}" for each in found]
    return ", ".join(sorted(set(texts)))


def _identity(row: Mapping[str, Any]) -> str:
    """Text that is equal for two rows of the same work on the same processor and version of torch."""
    # Through JSON: a tuple of this run is a list in the log.
    versions = row.get("versions") or {}
    names = ("case", "row", "configuration", "cpu", "cores", "gpu")
    return json.dumps([*(row.get(name) for name in names), versions.get("torch")], sort_keys=True)


def _has_figure(row: Mapping[str, Any], figure: str) -> bool:
    # Rows of versions before the comparison say no configuration.
    return row.get("configuration") is not None and row.get(figure) is not None


def _middle(value: Any) -> float:
    """The median of a summary, as measured or as logged; other numbers are themselves."""
    if isinstance(value, Mapping):
        return value["median"]
    return getattr(value, "median", value)
