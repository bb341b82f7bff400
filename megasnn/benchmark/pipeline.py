"""Pipeline schedules beside their simulation from measured costs, and beside one rank, in one run.

A fresh pair of ranks holds an engine for every schedule, another process the single rank. They take turns: in every
round the costs of the layers are measured anew, then each schedule takes its steps. What slows the machine for a while
slows a round's costs and its steps alike, so that ratios are taken round by round.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, Literal

from megasnn.benchmark.log import append_lines, latest_alike, read_lines, surroundings
from megasnn.benchmark.processes import RankProcesses
from megasnn.benchmark.results import summary
from megasnn.benchmark.run import THREAD_VARIABLES
from megasnn.config.checks import ConfigError, above, at_least
from megasnn.schedule.named import AUTO, SCHEDULES

if TYPE_CHECKING:
    from megasnn.benchmark.pipeline_worker import PipelineTurn, PipelineWorker

ModelName = Literal["spikformer_ti", "spikformer_s", "spikformer_cifar10", "vgg_dvs"]
ONE_BATCH = "one batch"  # a single rank that takes all samples in one go
ONE_RANK = "one rank"  # a single rank with the pipeline's micro-batches: it computes the same function
SINGLE = (ONE_BATCH, ONE_RANK)


@dataclass(frozen=True)
class PipelineBenchmark:
    """Every schedule on a pipeline of ranks with one thread each."""

    models: tuple[ModelName, ...] = ("spikformer_cifar10", "vgg_dvs")
    """Each is measured by itself, one after the other."""
    stages: int = 2
    """Pipeline ranks."""
    micro_batches: int = 8
    """Micro-batches of a step."""
    micro_batch_size: int = 4
    """Samples in each."""
    schedules: tuple[str, ...] = (*SCHEDULES, AUTO)
    """By name; auto is the best that the search finds for the measured costs."""
    rounds: int = 5
    """How often each schedule has its turn."""
    steps: int = 1
    """Timed steps of a turn; one untimed step comes before them."""
    timeout: float = 600.0
    """Seconds that anything may take before the benchmark gives up."""
    output: Path = Path("benchmark.jsonl")
    """File to append one JSON line per schedule to; earlier lines in it are compared with."""

    @property
    def samples(self) -> int:
        return self.micro_batches * self.micro_batch_size

    def check(self) -> None:
        """Raises ConfigError with everything that cannot be run."""
        wrong = at_least(self, 1, "micro_batches", "micro_batch_size", "rounds", "steps") + at_least(self, 2, "stages")
        wrong += above(self, 0, "timeout")
        unknown = [name for name in self.schedules if name not in SCHEDULES.choices]
        wrong += [f"--schedules: {name!r} is none; known: {', '.join(SCHEDULES.choices)}" for name in unknown]
        if not self.schedules or not self.models:
            wrong.append("--schedules and --models must name at least one")
        if wrong:
            raise ConfigError(wrong)


@dataclass(frozen=True)
class PipelineTask:
    """What a rank is told when it starts; `store` is a file through which the ranks find each other."""

    config: PipelineBenchmark
    model: ModelName
    stages: int
    rank: int
    store: str


@dataclass
class Measured:
    """Of one row. `turns`: one entry per round, with what each rank says; `simulated`: seconds by the round's costs."""

    about: list[dict[str, Any]] = field(default_factory=list)
    turns: list[list[PipelineTurn]] = field(default_factory=list)
    simulated: list[float] = field(default_factory=list)


def make_pipeline_worker(task: PipelineTask) -> PipelineWorker:
    from megasnn.benchmark.pipeline_worker import PipelineWorker

    return PipelineWorker(task)


def run_pipelines(config: PipelineBenchmark) -> list[dict[str, Any]]:
    """Measures, prints a table for each model, appends to the log. Returns the lines that were appended.

    Raises:
        ConfigError: values out of range.
        RowError: a rank failed.
        ValueError: the log holds a line that is not JSON.
    """
    config.check()
    earlier = read_lines(config.output)
    lines: list[dict[str, Any]] = []
    for model in dict.fromkeys(config.models):
        measured = _measure(config, model)
        around = surroundings(None)
        own = [{**around, **line} for line in _figures(config, model, measured)]
        append_lines(config.output, own)
        print(
            f"\n{model}: {config.stages} stages of one thread, {config.micro_batches} micro-batches of "
            f"{config.micro_batch_size}; {config.rounds} rounds; {around['machine']['cpu']}, "
            f"{around['machine']['cores']} cores\n\n{_table(own, [latest_alike(line, earlier) for line in own])}"
        )
        lines += own
    print(f"\n{NOTES}\n\nappended to {config.output}")
    return lines


def _measure(config: PipelineBenchmark, model: ModelName) -> dict[str, Measured]:
    with ExitStack() as stack, tempfile.TemporaryDirectory(prefix="megasnn-benchmark-") as folder:
        single, pipeline = (
            stack.enter_context(closing(_start(config, model, stages, f"{folder}/{stages}")))
            for stages in (1, config.stages)
        )
        rows = {**dict.fromkeys(SINGLE, single), **dict.fromkeys(dict.fromkeys(config.schedules), pipeline)}
        for ranks in (single, pipeline):
            ranks.ready(config.timeout)
        measured = {}
        for name, ranks in rows.items():
            _say(f"{model}: building and warming up {name}")
            measured[name] = Measured(ranks.call("prepare", name, timeout=config.timeout))
        for turn in range(config.rounds):
            _say(f"round {turn + 1}/{config.rounds}, ms:", end="")
            pipeline.call("measure_costs", timeout=config.timeout)
            for name, ranks in rows.items():
                measured[name].turns.append(ranks.call("measure", name, config.steps, timeout=config.timeout))
                _say(f"  {name} {1e3 * _seconds(measured[name].turns[-1]):.0f}", end="")
                if name not in SINGLE:
                    measured[name].simulated.append(pipeline.call("simulate", name, timeout=config.timeout)[0])
            _say("")
    return measured


def _start(config: PipelineBenchmark, model: ModelName, stages: int, store: str) -> RankProcesses:
    tasks = [PipelineTask(config, model, stages, rank, store) for rank in range(stages)]
    name = f"{model} on {stages} rank(s)"
    return RankProcesses(name, make_pipeline_worker, tasks, dict.fromkeys(THREAD_VARIABLES, "1"))


def _seconds(turn: Sequence[PipelineTurn], part: str = "step") -> float:
    """Median over the steps, each as long as on the rank where it takes longest."""
    return median(max(ranks) for ranks in zip(*(getattr(rank, part) for rank in turn), strict=True))


def _figures(config: PipelineBenchmark, model: ModelName, measured: Mapping[str, Measured]) -> list[dict[str, Any]]:
    return [_own_figures(config, model, name, measured) for name in measured]


def _own_figures(
    config: PipelineBenchmark, model: ModelName, name: str, measured: Mapping[str, Measured]
) -> dict[str, Any]:
    row = measured[name]
    steps = [_seconds(turn) for turn in row.turns]
    schedule = [_seconds(turn, "schedule") for turn in row.turns]
    first = row.about[0]
    figures = {
        "row": f"pipeline {name}",
        "model": model,
        "schedule": first["schedule"],
        "layout": first["layout"],
        "step_ms": summary([1e3 * value for value in steps]),
        "schedule_ms": summary([1e3 * value for value in schedule]),
        "throughput_ratio": {
            other: summary([_seconds(theirs) / ours for theirs, ours in zip(measured[other].turns, steps, strict=True)])
            for other in SINGLE
        },
        "peak_mb": [max(turn[rank].peak_mb for turn in row.turns) for rank in range(len(row.about))],
        "forward_bytes_ratio": first["forward_bytes_ratio"],
        "configuration": {**asdict(config), "output": "", "model": model, "row": name, "rounds": 0, "schedules": ()},
    }
    if row.simulated:
        figures["simulated_ms"] = summary([1e3 * value for value in row.simulated])
        figures["ratio_to_simulated"] = summary([m / s for m, s in zip(schedule, row.simulated, strict=True)])
        figures["simulated_bubble"] = first["bubble"]
        figures["simulated_peak_mb"] = first["peak_mb"]
    return figures


HEADINGS = (
    ("", "schedule"),
    ("", "that is"),
    ("", "layers"),
    ("step", "ms"),
    ("schedule", "ms"),
    ("simu-", "lated"),
    ("measured/", "simulated"),
    ("", "bubble"),
    ("x one", "rank"),
    ("x one", "batch"),
    ("peak", "MB"),
    ("simu-", "lated"),
    ("forward", "bytes"),
    ("step,", "change"),
)
NOTES = """\
schedule ms: from the first to the last action, up to the reduced gradients; the step adds norm, clipping and AdamW
simulated: the same from the costs of the layers measured in the same round; measured/simulated and x: round by round
x one rank, x one batch: throughput against one rank with the same micro-batches, and with all samples in one go
peak MB: on each rank, what a schedule needs above weights, gradients and optimizer state; simulated: activations and
   the layers' working memory
forward bytes: sent between stages, as a part of float32
change: against the latest line in the log of the same row and configuration on the same kind of machine"""


def _table(lines: Sequence[Mapping[str, Any]], earlier: Sequence[Mapping[str, Any] | None]) -> str:
    cells = [*map(list, zip(*HEADINGS, strict=True)), *map(_cells, lines, earlier)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return "\n".join(
        "  ".join([row[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(row[1:], widths[1:], strict=True))])
        for row in cells
    )


def _cells(line: Mapping[str, Any], last: Mapping[str, Any] | None) -> list[str]:
    simulated = "simulated_ms" in line
    ratio = line["forward_bytes_ratio"]
    step = line["step_ms"]["median"]
    return [
        line["row"].removeprefix("pipeline "),
        line["schedule"],
        line["layout"],
        f"{step:.1f}",
        f"{line['schedule_ms']['median']:.1f}",
        f"{line['simulated_ms']['median']:.1f}" if simulated else "-",
        f"{line['ratio_to_simulated']['median']:.3f}" if simulated else "-",
        f"{line['simulated_bubble']:.1%}" if simulated else "-",
        *(f"{line['throughput_ratio'][other]['median']:.2f}" for other in (ONE_RANK, ONE_BATCH)),
        "|".join(f"{mb:.0f}" for mb in line["peak_mb"]),
        "|".join(f"{mb:.0f}" for mb in line["simulated_peak_mb"]) if simulated else "-",
        f"1/{1 / ratio:.1f}" if ratio else "-",
        "-" if last is None else f"{step / last['step_ms']['median'] - 1:+.1%}",
    ]


def _say(text: str, end: str = "\n") -> None:
    print(text, end=end, file=sys.stderr, flush=True)
