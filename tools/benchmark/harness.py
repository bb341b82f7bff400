"""A benchmark case from its flags to its log: rounds, summaries and the table."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import median, quantiles
from typing import Any, ClassVar

from megasnn.common.memory import processor_name
from megasnn.config.checks import ConfigError, at_least
from tools.benchmark.history import compare, compared_with, read_log

# The figures of one row by name: numbers, texts, Summary, or None.
Figures = dict[str, Any]
# Heading, name of the figure, format of its numbers.
Column = tuple[str, str, str]
PACKAGES = ("torch", "spikingjelly", "numba", "triton", "megasnn")


@dataclass(frozen=True)
class Summary:
    """Median, quartiles and extremes of the rounds."""

    median: float
    q1: float
    q3: float
    least: float
    most: float


@dataclass(frozen=True)
class Case(ABC):
    """Flags of every case. Subclasses add flags and measure."""

    columns: ClassVar[Sequence[Column]]
    details: ClassVar[Sequence[Column]] = ()
    """Columns of a second table, for figures that would make the first one too wide."""
    notes: ClassVar[str] = ""
    compared: ClassVar[str | None] = None
    """Figure that is compared with the latest earlier row of the same configuration in the log."""

    rounds: int = 5
    """Number of turns of each row."""
    output: Path = Path("runs/benchmark.jsonl")
    """File to append a JSON line per row to."""

    def problems(self) -> list[str]:
        """Contradictions between flags, one sentence each."""
        return at_least(self, 1, "rounds")

    @abstractmethod
    def measure(self) -> list[Figures]:
        """Figures of each row, with its name as "row". Raises RankError, ValueError."""


def run(case: Case) -> None:
    """Measures, logs and prints. Raises ConfigError for contradictory flags, RankError if a rank failed."""
    problems = case.problems()
    if problems:
        raise ConfigError(problems)
    # Before measuring: a log that cannot be read must not cost the measurement.
    earlier = read_log(case.output)
    measured = case.measure()
    about = {**surroundings(), "case": type(case).__name__, "flags": asdict(case)}
    rows = [{**about, **row} for row in measured]
    if case.compared:
        compare(rows, earlier, case.compared)
    case.output.parent.mkdir(parents=True, exist_ok=True)
    with case.output.open("a") as file:
        for row in rows:
            file.write(json.dumps(row, default=_plain) + "\n")
    machine = f"{about['cpu']}, {about['cores']} cores, torch {about['versions']['torch']}"
    lines = ["", machine]
    for columns in filter(None, (case.columns, case.details)):
        lines += ["", table(columns, rows)]
    lines += ["", case.notes]
    if others := compared_with(rows):
        lines.append(f"now/then compares with {others}")
    print("\n".join([*lines, f"appended to {case.output}"]))


def surroundings() -> Figures:
    """Time, machine and versions of a run."""
    describe = ["git", "describe", "--always", "--abbrev=12", "--exclude=*", "--dirty=+"]
    commit = subprocess.run(describe, cwd=Path(__file__).parent, capture_output=True, text=True, check=False)
    versions: dict[str, str | None] = {"python": platform.python_version()}
    for name in PACKAGES:
        versions[name] = _version(name)
    return {
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "cpu": processor_name(),
        "cores": os.cpu_count(),
        "commit": commit.stdout.strip() or None,
        "versions": versions,
    }


def table(columns: Sequence[Column], rows: Sequence[Mapping[str, Any]]) -> str:
    """The rows as a text table. A summary is shown as its median and quartiles."""
    lines = [[heading for heading, _, _ in columns]]
    for row in rows:
        lines.append([_cell(row.get(name), digits) for _, name, digits in columns])
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join("  ".join(map(str.rjust, line, widths)) for line in lines)


def rounds(count: int, untimed: int = 0) -> Iterator[int]:
    """Numbers of the rounds, from 1; untimed rounds come first and end at 0."""
    for number in range(1 - untimed, count + 1):
        say(f"round {number}/{count}")
        yield number


def seconds(work: Callable[[], object]) -> float:
    """Duration of `work()`."""
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


def summary(values: Sequence[float]) -> Summary:
    # quantiles() needs two values.
    several = values if len(values) > 1 else [values[0], values[0]]
    first, _, third = quantiles(several, n=4, method="inclusive")
    return Summary(median(values), first, third, min(values), max(values))


def ratios(values: Sequence[float], others: Sequence[float]) -> Summary:
    """Summary of `values / others` by round: a slow phase of the machine affects both."""
    return summary([value / other for value, other in zip(values, others, strict=True)])


def say(text: str, end: str = "\n") -> None:
    """Prints progress on stderr."""
    print(text, end=end, file=sys.stderr, flush=True)


def _cell(value: Any, digits: str) -> str:
    if value is None:
        return "-"
    if isinstance(value, Summary):
        return f"{value.median:{digits}} ({value.q1:{digits}}..{value.q3:{digits}})"
    return value if isinstance(value, str) else format(value, digits)


def _plain(value: object) -> object:
    return asdict(value) if isinstance(value, Summary) else str(value)


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
