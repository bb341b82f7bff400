"""The figures as text: a table with one line per row, and a short summary."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from megasnn.benchmark.results import total_traffic
from megasnn.benchmark.rows import MEGASNN, SPIKINGJELLY

Line = Mapping[str, Any]

HEADINGS = (
    ("", "row"),
    ("ranks x", "threads"),
    ("step", "ms"),
    ("", "quartiles"),
    ("samples", "per s"),
    ("x one", "rank"),
    ("x Spiking", "Jelly"),
    ("peak", "MB"),
    ("x one", "rank"),
    ("", "calls"),
    ("MB", "sent"),
    ("fwd+bwd", "ms"),
    ("optimizer", "ms"),
    ("step,", "change"),
    ("peak,", "change"),
)
NOTES = """\
x: throughput against the row megasnn (one rank, one thread) or spikingjelly, median of the rounds, each compared with
   itself; behind peak MB, memory against the row megasnn
peak MB: of the largest rank, above its memory before the model was built, everything imported and warmed up
calls, MB sent: collectives and sends of the busiest rank in one step
change: against the latest line in the log of the same row and configuration on the same kind of machine"""


def table(lines: Sequence[Line], earlier: Sequence[Line | None]) -> str:
    """`earlier`: for each line the one that it is compared with."""
    cells = [
        *map(list, zip(*HEADINGS, strict=True)),
        *(_cells(line, last) for line, last in zip(lines, earlier, strict=True)),
    ]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return "\n".join(
        "  ".join([row[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(row[1:], widths[1:], strict=True))])
        for row in cells
    )


def _cells(line: Line, last: Line | None) -> list[str]:
    step, phases = line["step_ms"], line["phases_ms"]
    calls, sent = max(map(total_traffic, line["traffic"]), key=lambda pair: pair[1])
    memory_ratio = line["memory_ratio"].get(MEGASNN)
    return [
        line["row"],
        f"{line['layout']['ranks']} x {line['threads']}",
        f"{step['median']:.1f}",
        f"{step['q1']:.1f}..{step['q3']:.1f}",
        f"{line['samples_per_s']:.1f}",
        _ratio(line, MEGASNN),
        _ratio(line, SPIKINGJELLY),
        f"{line['memory_mb']['largest']:.0f}",
        "-" if memory_ratio is None else f"{memory_ratio:.2f}",
        str(calls),
        f"{sent:.2f}",
        f"{phases['forward_backward']:.1f}",
        f"{phases['optimizer']:.1f}",
        "-" if last is None else _change(step["median"], last["step_ms"]["median"]),
        "-" if last is None else _change(line["memory_mb"]["largest"], last["memory_mb"]["largest"]),
    ]


def _ratio(line: Line, reference: str) -> str:
    ratio = line["throughput_ratio"].get(reference)
    return "-" if ratio is None else f"{ratio['median']:.2f}"


def _change(now: float, before: float) -> str:
    return f"{now / before - 1:+.1%}" if before else "-"


def brief(lines: Sequence[Line]) -> str:
    """One rank against SpikingJelly, then each layout against one rank: throughput with quartiles, memory."""
    said = []
    for line in lines:
        reference = SPIKINGJELLY if line["row"] == MEGASNN else MEGASNN
        same_threads = line["threads"] == 1 and not line["row"].startswith(SPIKINGJELLY)
        if same_threads and reference in line["throughput_ratio"]:
            said.append(_comparison(line, reference))
    return "\n".join(said)


def _comparison(line: Line, reference: str) -> str:
    speed, memory = line["throughput_ratio"][reference], line["memory_ratio"][reference]
    stages = f"; layers {line['pipeline_layout']}" if line["pipeline_layout"] else ""
    return (
        f"{_TITLES.get(line['row'], line['row'])}: {speed['median']:.2f} x the throughput of {_TITLES[reference]} "
        f"(quartiles {speed['q1']:.2f}..{speed['q3']:.2f}), {memory:.2f} x its peak memory a rank{stages}"
    )


_TITLES = {MEGASNN: "one rank", SPIKINGJELLY: "SpikingJelly in one process"}
