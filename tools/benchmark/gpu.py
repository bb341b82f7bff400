"""The check of a GPU: parts that each give figures with targets, one table and one JSON line of all of them.

A part that fails does not keep the others from running. Every part runs on a CPU as well, on tiny sizes and without
targets: so it is known to run before it meets a GPU.
"""

from __future__ import annotations

import json
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch

from tools.benchmark.harness import say
from tools.benchmark.log import append_lines, plain, surroundings
from tools.benchmark.table import table

LIMIT_S = 570.0
PASSED, MISSED, NO_GPU = 0, 1, 2
HEADINGS = ("what", "figure", "target", "met", "")


@dataclass(frozen=True)
class Figure:
    """
    Attributes:
        least, most: the target; without both of them the figure is for information.
        note: what it was measured on.
    """

    name: str
    value: float
    unit: str = ""
    least: float | None = None
    most: float | None = None
    note: str = ""

    @property
    def is_met(self) -> bool | None:
        """None without a target."""
        if self.least is None and self.most is None:
            return None
        return (self.least is None or self.value >= self.least) and (self.most is None or self.value <= self.most)

    @property
    def target(self) -> str:
        bounds = ((">=", self.least), ("<=", self.most))
        return " ".join(f"{sign} {value:g}" for sign, value in bounds if value is not None)


@dataclass(frozen=True)
class Setting:
    """Attributes: what is measured on, and whether sizes are those of a test."""

    device: torch.device
    is_tiny: bool = False

    @property
    def has_targets(self) -> bool:
        return not self.is_tiny

    @property
    def name(self) -> Literal["cpu", "cuda"]:
        return "cuda" if self.device.type == "cuda" else "cpu"

    def wait(self) -> None:
        """Until the device has done what it was given."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def free(self) -> None:
        """Gives the device the memory back that torch keeps."""
        if self.device.type == "cuda":
            torch.cuda.empty_cache()


Part = Callable[[Setting], Iterator[Figure]]


@dataclass
class Outcome:
    """Attributes: figures by part, why parts failed or were left out, seconds of each part."""

    figures: dict[str, list[Figure]] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)

    @property
    def status(self) -> int:
        missed = any(each.is_met is False for figures in self.figures.values() for each in figures)
        return MISSED if missed or self.failures else PASSED


def run_parts(parts: Mapping[str, Part], setting: Setting, limit_s: float = LIMIT_S) -> Outcome:
    """One after the other. What a part gave before it failed is kept."""
    outcome, start = Outcome(), time.monotonic()
    for name, part in parts.items():
        begin = time.monotonic()
        if begin - start > limit_s:
            outcome.failures[name] = f"left out: {limit_s:.0f} seconds are over"
            continue
        say(f"{name} ...")
        figures = outcome.figures[name] = []
        try:
            for figure in part(setting):
                figures.append(figure)
                say(f"  {figure.name}: {figure.value:.4g} {figure.unit}")
                if time.monotonic() - start > limit_s:
                    outcome.failures[name] = f"ended after {figure.name!r}: {limit_s:.0f} seconds are over"
                    break
        except Exception as error:
            outcome.failures[name] = f"{type(error).__name__}: {error}"
            say("".join(traceback.format_exception(error)))
        try:
            setting.free()  # the ranks of other parts are processes of their own
        except RuntimeError as error:  # after an error of a kernel nothing on the GPU works in this process
            outcome.failures.setdefault(name, f"{type(error).__name__}: {error}")
        outcome.seconds[name] = time.monotonic() - begin
        say(f"  {outcome.seconds[name]:.0f} s")
    return outcome


def table_of(outcome: Outcome) -> str:
    rows = []
    for part, figures in outcome.figures.items():
        for each in figures:
            met = {None: "", True: "yes", False: "NO"}[each.is_met]
            rows.append([f"{part}: {each.name}", f"{each.value:.4g} {each.unit}".strip(), each.target, met, each.note])
    text = table(HEADINGS, rows)
    failures = [f"{part} failed: {why.splitlines()[0]}" for part, why in outcome.failures.items()]
    return "\n".join([text, *failures])


def json_line(outcome: Outcome, gpu: str | None) -> dict[str, Any]:
    figures = {
        part: [{**asdict(each), "met": each.is_met} for each in of_part] for part, of_part in outcome.figures.items()
    }
    told = {"figures": figures, "failures": outcome.failures, "seconds": outcome.seconds, "status": outcome.status}
    return plain({**surroundings(gpu), "row": "check_gpu", **told})


def check(parts: Mapping[str, Part], setting: Setting, output: Path) -> int:
    """Runs the parts, prints the table and the line, appends the line to a file; returns the exit status."""
    gpu = torch.cuda.get_device_name(setting.device) if setting.device.type == "cuda" else None
    outcome = run_parts(parts, setting)
    line = json_line(outcome, gpu)
    print(f"\n{table_of(outcome)}\n\n{json.dumps(line)}", flush=True)
    append_lines(output, [line])
    return outcome.status
