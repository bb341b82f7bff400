"""The check of a GPU, one process for each part and case: what one of them breaks is its own row.

After an error of a kernel nothing on the GPU works in its process, and a kernel may never end. Figures come one by one,
so that those of a process that dies are kept. The next process imports what it needs while one measures, and touches
no GPU before its turn.
"""

from __future__ import annotations

import json
import re
import time
from collections import deque
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import torch

from tools.benchmark.gpu import Figure, Outcome, Part, Setting, json_line, table_of
from tools.benchmark.harness import say
from tools.benchmark.log import append_lines
from tools.benchmark.ranks import RankError, RankProcesses

LIMIT_S = 570.0  # of a machine with one GPU; with more there is twice as much to do
START_S = 60.0
_RAISED = re.compile(r"^[\w.]*(?:Error|Exception|Exit|Interrupt)\b.*")


@dataclass(frozen=True)
class Unit:
    """Attributes: part: its name. case: one of its cases. work: the part."""

    part: str
    work: Part
    setting: Setting
    case: str

    @property
    def name(self) -> str:
        return f"{self.part}: {self.case}" if self.case else self.part


class UnitProcess:
    """What gives a unit's figures, in its process."""

    def __init__(self, task: tuple[object, Setting, str]) -> None:
        self._figures = _figures(*task)

    def next(self) -> Figure | None:
        """None behind the last one."""
        return next(self._figures, None)


def _figures(run: object, setting: Setting, case: str) -> Iterator[Figure]:
    setting.enter()
    yield from run(setting, case)  # type: ignore[operator]


def run_parts(parts: Mapping[str, Part], setting: Setting, limit_s: float = LIMIT_S) -> Outcome:
    """One unit after the other. What a unit gave before it failed is kept."""
    outcome, end = Outcome({name: [] for name in parts}), time.monotonic() + limit_s
    units = [Unit(name, part, setting, case) for name, part in parts.items() for case in part.cases(setting)]
    for name, part in parts.items():
        if part.needs and not part.cases(setting):
            outcome.figures[name].append(Figure("not run", None, note=f"needs {part.needs}"))
    with closing(_started(units)) as started:
        for unit, process in started:
            if time.monotonic() >= end:
                break
            _run(unit, process, outcome, end)
    for unit in units:
        if unit.name not in outcome.seconds:
            outcome.failures[unit.name] = f"left out: {limit_s:.0f} seconds of all parts are over"
    return outcome


def _started(units: Sequence[Unit]) -> Generator[tuple[Unit, RankProcesses]]:
    """Each unit with its process, which ends before that of the next one begins to work."""
    ahead: deque[RankProcesses] = deque()
    try:
        for place, unit in enumerate(units):
            for each in units[place + len(ahead) : place + 2]:
                task = each.work.run, each.setting, each.case
                ahead.append(RankProcesses(each.name, UnitProcess, [task], start_others=True))
            with closing(ahead.popleft()) as process:
                yield unit, process
    finally:
        for process in ahead:
            process.close()


def _run(unit: Unit, process: RankProcesses, outcome: Outcome, end: float) -> None:
    say(f"{unit.name} ...")
    figures, last = outcome.figures[unit.part], "before the first figure"
    begin, limit_s = time.monotonic(), START_S
    its_end = min(end, begin + limit_s)
    try:
        process.ready(its_end - begin)
        limit_s = unit.work.limit_s
        its_end = min(end, time.monotonic() + limit_s)
        while (figure := process.call("next", timeout=max(0.0, its_end - time.monotonic()))[0]) is not None:
            figures.append(figure)
            say(f"  {figure.name}: {figure.shown}")
            last = f"after {figure.name!r}"
    except RankError as error:
        say(str(error))
        outcome.failures[unit.name] = last_error(str(error))
        if time.monotonic() >= its_end:
            whose = f"its {limit_s:g} seconds" if its_end < end else "the seconds of all parts"
            outcome.failures[unit.name] = f"cut off {last}: {whose} are over"
    outcome.seconds[unit.name] = time.monotonic() - begin
    say(f"  {outcome.seconds[unit.name]:.0f} s")


def last_error(text: str) -> str:
    """The line that names the last exception of a traceback, with the next one where it goes on there; the last line
    of a text without any. What a driver adds behind its error is left out."""
    lines = [line.rstrip() for line in text.splitlines() if line.strip()]
    raised = [place for place, line in enumerate(lines) if _RAISED.match(line)]
    if not raised:
        return lines[-1].removeprefix("rank 0: ")
    found = lines[raised[-1]]
    return " ".join(line.strip() for line in lines[raised[-1] : raised[-1] + 2]) if found.endswith(":") else found


def check(parts: Mapping[str, Part], setting: Setting, output: Path) -> int:
    """Runs the parts, prints the table and the line, appends the line to a file; returns the exit status."""
    gpu = torch.cuda.get_device_name(setting.device) if setting.is_gpu else None
    outcome = run_parts(parts, setting, LIMIT_S if setting.gpus < 2 else 2 * LIMIT_S)
    line = json_line(outcome, gpu)
    print(f"\n{table_of(outcome)}\n\n{json.dumps(line)}", flush=True)
    append_lines(output, [line])
    return outcome.status
