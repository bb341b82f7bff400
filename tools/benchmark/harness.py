"""What all cases of the benchmark share: a run from its flags to its log, its rounds, and figures of rounds."""

from __future__ import annotations

import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median, quantiles
from typing import Any, Generic, TypeVar

from megasnn.config.checks import ConfigError
from tools.benchmark.log import Line, append_lines, latest_alike, plain, read_lines, surroundings

Figures = dict[str, Any]  # of one row, as the log has them


@dataclass(frozen=True)
class Flags(ABC):
    """The flags that every case has."""

    output: Path = Path("benchmark.jsonl")
    """File to append one JSON line per row to; earlier lines in it are compared with."""

    @abstractmethod
    def problems(self) -> list[str]:
        """Everything that cannot be run, one message each."""

    def check(self) -> None:
        """Raises ConfigError with everything that cannot be run."""
        wrong = self.problems()
        if wrong:
            raise ConfigError(wrong)


CaseFlags = TypeVar("CaseFlags", bound=Flags)


@dataclass(frozen=True)
class Part:
    """The figures of rows that were measured together, which are logged and shown at once; and the GPU they ran on."""

    rows: list[Figures]
    gpu: str | None = None


@dataclass(frozen=True)
class Case(Generic[CaseFlags]):
    """
    Attributes:
        flags: its command line; the docstring is the help's.
        measure: yields each part when it has been measured.
        report: the lines of a part as text, beside the earlier line that each is compared with.
        notes: what the columns mean, for the end.
    """

    flags: type[CaseFlags]
    measure: Callable[[CaseFlags], Iterator[Part]]
    report: Callable[[CaseFlags, Sequence[Line], Sequence[Line | None]], str]
    notes: str = ""


def run(case: Case[CaseFlags], flags: CaseFlags) -> None:
    """Measures, prints what was measured, appends it to the log.

    Raises:
        ConfigError: flags that do not go together.
        RankError: a rank failed.
        ValueError: the log holds a line that is not JSON, or what the flags name cannot be used.
    """
    flags.check()
    earlier = read_lines(flags.output)
    for part in case.measure(flags):
        around = surroundings(part.gpu)
        lines = [plain({**around, **figures}) for figures in part.rows]
        append_lines(flags.output, lines)
        print(f"\n{case.report(flags, lines, [latest_alike(line, earlier) for line in lines])}")
    if case.notes:
        print(f"\n{case.notes}")
    print(f"\nappended to {flags.output}")


def rounds(count: int, untimed: int = 0) -> Iterator[int]:
    """The numbers of the rounds, from 1; those of `untimed` ones come before."""
    for number in range(1 - untimed, count + 1):
        say(f"round {number}/{count}")
        yield number


def seconds(work: Callable[[], object]) -> float:
    """How long `work()` takes."""
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


def summary(values: Sequence[float]) -> dict[str, float]:
    """Median, quartiles and extremes."""
    first, _, third = quantiles(values if len(values) > 1 else [*values] * 2, n=4, method="inclusive")
    return {"median": median(values), "q1": first, "q3": third, "min": min(values), "max": max(values)}


def ratios(values: Sequence[float], others: Sequence[float]) -> dict[str, float]:
    """Summary of `values / others`, compared round by round: what slows the machine for a while slows both."""
    return summary([value / other for value, other in zip(values, others, strict=True)])


def say(text: str, end: str = "\n") -> None:
    """Shows how far a run has come; standard output is left to its results."""
    print(text, end=end, file=sys.stderr, flush=True)
