"""The check of a GPU: parts that each give figures with targets, one table and one JSON line of all of them.

Every part runs on a CPU as well, on tiny sizes and without targets: so it is known to run before it meets a GPU.
`gpu_units.py` runs them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

import torch

from tools.benchmark.log import plain, surroundings
from tools.benchmark.table import table

PASSED, MISSED, NO_GPU = 0, 1, 2
HEADINGS = ("what", "figure", "target", "met")


@dataclass(frozen=True)
class Figure:
    """
    Attributes:
        value: None where there is none, for the reason in the note.
        least, most: the target; without both of them the figure is for information.
        note: what it was measured on.
    """

    name: str
    value: float | None
    unit: str = ""
    least: float | None = None
    most: float | None = None
    note: str = ""

    @property
    def is_met(self) -> bool | None:
        """None without a target."""
        if self.least is None and self.most is None:
            return None
        if self.value is None:
            return False
        return (self.least is None or self.value >= self.least) and (self.most is None or self.value <= self.most)

    @property
    def target(self) -> str:
        bounds = ((">=", self.least), ("<=", self.most))
        return " ".join(f"{sign} {value:g}" for sign, value in bounds if value is not None)

    @property
    def shown(self) -> str:
        return "-" if self.value is None else f"{self.value:.4g} {self.unit}".strip()


@dataclass(frozen=True)
class Setting:
    """Attributes: what is measured on, and whether sizes are those of a test."""

    device: torch.device
    is_tiny: bool = False

    def target(self, value: float) -> float | None:
        """A bound of a figure, which holds for full sizes only."""
        return None if self.is_tiny else value

    @property
    def is_gpu(self) -> bool:
        return self.device.type == "cuda"

    @property
    def name(self) -> Literal["cpu", "cuda"]:
        return "cuda" if self.is_gpu else "cpu"

    @property
    def gpus(self) -> int:
        """How many ranks can have one of their own; on a CPU as many as a test has."""
        return torch.cuda.device_count() if self.is_gpu else 2

    def enter(self) -> None:
        """Makes the device this process's own."""
        if self.is_gpu:
            torch.cuda.set_device(self.device)

    def wait(self) -> None:
        """Until the device has done what it was given."""
        if self.is_gpu:
            torch.cuda.synchronize(self.device)


def once(setting: Setting) -> Sequence[str]:
    """The cases of a part that has none."""
    return ("",)


@dataclass(frozen=True)
class Part:
    """
    Attributes:
        run: gives the figures of a case. A function of a module, since a process of its own calls it.
        limit_s: seconds that a case may take from the first figure on.
        cases: what is measured each by itself, so that one that fails loses no other: models, numbers of ranks.
        needs: what a machine lacks that has no case.
    """

    run: Callable[[Setting, str], Iterator[Figure]]
    limit_s: float
    cases: Callable[[Setting], Sequence[str]] = once
    needs: str = ""


@dataclass
class Outcome:
    """Attributes: figures by part; why units, each a part and a case, failed or were left out; seconds of each unit."""

    figures: dict[str, list[Figure]] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)

    @property
    def status(self) -> int:
        missed = any(each.is_met is False for figures in self.figures.values() for each in figures)
        return MISSED if missed or self.failures else PASSED


def table_of(outcome: Outcome) -> str:
    """With the notes behind it, which may be long."""
    rows, notes = [], [""]
    for part, figures in outcome.figures.items():
        for each in figures:
            met = {None: "", True: "yes", False: "NO"}[each.is_met]
            rows.append([f"{part}: {each.name}", each.shown, each.target, met])
            notes.append(each.note)
    for unit, why in outcome.failures.items():
        rows.append([unit, "failed", "", "NO"])
        notes.append(why)
    lines = table(HEADINGS, rows).split("\n")
    return "\n".join(f"{line}  {note}".rstrip() for line, note in zip(lines, notes, strict=True))


def json_line(outcome: Outcome, gpu: str | None) -> dict[str, Any]:
    figures = {
        part: [{**asdict(each), "met": each.is_met} for each in of_part] for part, of_part in outcome.figures.items()
    }
    told = {"figures": figures, "failures": outcome.failures, "seconds": outcome.seconds, "status": outcome.status}
    return plain({**surroundings(gpu), "row": "check_gpu", **told})
