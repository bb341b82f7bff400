"""Pipeline schedules beside their simulation from measured costs, and beside one rank, in one run.

A fresh pair of ranks holds an engine for every schedule, another process the single rank. They take turns: in every
round the costs of the layers are measured anew, then each schedule takes its steps. What slows the machine for a while
slows a round's costs and its steps alike, so that ratios are taken round by round.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from statistics import median

from tools.benchmark.harness import Case, Figures, Part, ratios, rounds, say, summary
from tools.benchmark.log import Line
from tools.benchmark.models import ModelName
from tools.benchmark.pipeline_flags import ONE_BATCH, ONE_RANK, SINGLE, Measured, PipelineBenchmark, PipelineTurn
from tools.benchmark.pipeline_rank import PipelineRank
from tools.benchmark.ranks import start_row
from tools.benchmark.table import change, table

HEADINGS = (
    "schedule",
    "that is",
    "layers",
    "step\nms",
    "schedule\nms",
    "simu-\nlated",
    "measured/\nsimulated",
    "bubble",
    "x one\nrank",
    "x one\nbatch",
    "peak\nMB",
    "simu-\nlated",
    "forward\nbytes",
    "step,\nchange",
)
NOTES = """\
schedule ms: from the first to the last action, up to the reduced gradients; the step adds norm, clipping and AdamW
simulated: the same from the costs of the layers measured in the same round; measured/simulated and x: round by round
x one rank, x one batch: throughput against one rank with the same micro-batches, and with all samples in one go
peak MB: on each rank, what a schedule needs above weights, gradients and optimizer state; simulated: activations and
   the layers' working memory
forward bytes: sent between stages, as a part of float32
change: against the latest line in the log of the same row and configuration on the same kind of machine"""


def measure(flags: PipelineBenchmark) -> Iterator[Part]:
    """Each model by itself."""
    for model in dict.fromkeys(flags.models):
        yield Part(figures(flags, model, _measure(flags, model)))


def _measure(flags: PipelineBenchmark, model: ModelName) -> dict[str, Measured]:
    limit = flags.timeout
    with ExitStack() as stack:
        single, pipeline = (
            stack.enter_context(start_row(f"{model} on {stages} rank(s)", PipelineRank, (flags, model), stages))
            for stages in (1, flags.stages)
        )
        rows = {**dict.fromkeys(SINGLE, single), **dict.fromkeys(flags.schedules, pipeline)}
        for ranks in (single, pipeline):
            ranks.ready(limit)
        measured = {}
        for name, ranks in rows.items():
            say(f"{model}: building and warming up {name}")
            measured[name] = Measured(ranks.call("prepare", name, timeout=limit))
        for _ in rounds(flags.rounds):
            pipeline.call("measure_costs", timeout=limit)
            for name, ranks in rows.items():
                turn = ranks.call("measure", name, flags.steps, timeout=limit)
                measured[name].turns.append(turn)
                say(f"  {name} {1e3 * _seconds(turn):.0f} ms", end="")
                if name not in SINGLE:
                    measured[name].simulated.append(pipeline.call("simulate", name, timeout=limit)[0])
            say("")
    return measured


def _seconds(turn: Sequence[PipelineTurn], part: str = "step") -> float:
    """Median over the steps, each as long as on the rank where it takes longest."""
    return median(max(ranks) for ranks in zip(*(getattr(rank, part) for rank in turn), strict=True))


def figures(flags: PipelineBenchmark, model: ModelName, measured: Mapping[str, Measured]) -> list[Figures]:
    """The figures of every row, as they are logged."""
    return [_own_figures(flags, model, name, measured) for name in measured]


def _own_figures(flags: PipelineBenchmark, model: ModelName, name: str, measured: Mapping[str, Measured]) -> Figures:
    row = measured[name]
    steps = [_seconds(turn) for turn in row.turns]
    schedule = [_seconds(turn, "schedule") for turn in row.turns]
    first = row.about[0]
    own: Figures = {
        "row": f"pipeline {name}",
        "model": model,
        "schedule": first["schedule"],
        "layout": first["layout"],
        "step_ms": summary([1e3 * value for value in steps]),
        "schedule_ms": summary([1e3 * value for value in schedule]),
        "throughput_ratio": {
            other: ratios([_seconds(turn) for turn in measured[other].turns], steps) for other in SINGLE
        },
        "peak_mb": [max(turn[rank].peak_mb for turn in row.turns) for rank in range(len(row.about))],
        "forward_bytes_ratio": first["forward_bytes_ratio"],
        "configuration": {**asdict(flags), "output": "", "model": model, "row": name, "rounds": 0, "schedules": ()},
    }
    if row.simulated:
        own["simulated_ms"] = summary([1e3 * value for value in row.simulated])
        own["ratio_to_simulated"] = ratios(schedule, row.simulated)
        own["simulated_bubble"] = first["bubble"]
        own["simulated_peak_mb"] = first["peak_mb"]
    return own


def report(flags: PipelineBenchmark, lines: Sequence[Line], earlier: Sequence[Line | None]) -> str:
    machine = lines[0]["machine"]
    return (
        f"{lines[0]['model']}: {flags.stages} stages of one thread, {flags.micro_batches} micro-batches of "
        f"{flags.micro_batch_size}; {flags.rounds} rounds; {machine['cpu']}, {machine['cores']} cores\n\n"
        f"{table_of(lines, earlier)}"
    )


def table_of(lines: Sequence[Line], earlier: Sequence[Line | None]) -> str:
    """`earlier`: for each line the one that it is compared with."""
    return table(HEADINGS, list(map(_cells, lines, earlier)))


def _cells(line: Line, last: Line | None) -> list[str]:
    simulated = "simulated_ms" in line
    ratio = line["forward_bytes_ratio"]
    return [
        line["row"].removeprefix("pipeline "),
        line["schedule"],
        line["layout"],
        f"{line['step_ms']['median']:.1f}",
        f"{line['schedule_ms']['median']:.1f}",
        f"{line['simulated_ms']['median']:.1f}" if simulated else "-",
        f"{line['ratio_to_simulated']['median']:.3f}" if simulated else "-",
        f"{line['simulated_bubble']:.1%}" if simulated else "-",
        *(f"{line['throughput_ratio'][other]['median']:.2f}" for other in (ONE_RANK, ONE_BATCH)),
        "|".join(f"{mb:.0f}" for mb in line["peak_mb"]),
        "|".join(f"{mb:.0f}" for mb in line["simulated_peak_mb"]) if simulated else "-",
        f"1/{1 / ratio:.1f}" if ratio else "-",
        change(line, last, "step_ms", "median"),
    ]


PIPELINE = Case(PipelineBenchmark, measure, report, NOTES)
