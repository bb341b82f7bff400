"""Schedules as ranks execute them that sleep where they would compute, beside their simulation.

The executor, the transfers and the gradient buckets are those of training; layers sleep (sleeping.py), and links take a
stated time (links.py, nccl_like.py). So a few cores are enough for many ranks, and what is seen is the schedule:
whether it takes as long as simulated, and which transfers and reductions are hidden behind computing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from megasnn.schedule import Kind, Simulation
from megasnn.schedule.actions import COMPUTE
from megasnn.schedule.gantt import SECONDS, View, write_chart
from megasnn.training.profile import measured_simulation
from tools.benchmark.harness import Case, Figures, Part, say, summary
from tools.benchmark.log import Line
from tools.benchmark.queued_device import Moved
from tools.benchmark.ranks import RankProcesses, start_row
from tools.benchmark.rehearsal_flags import Prepared, RankStep, RehearsalBenchmark
from tools.benchmark.rehearsal_rank import RehearsalRank
from tools.benchmark.sleeping import SleepingLayer
from tools.benchmark.table import change, table

BETWEEN_REPLICAS = ("data", "copies", "weight", "scatter")  # groups, of which those of the same ranks may be one
HEADINGS = (
    "schedule",
    "layers",
    "simu-\nlated ms",
    "rehearsed\nms",
    "rehearsed/\nsimulated",
    "bubble,\nsimulated",
    "\nrehearsed",
    "again ms,\nsimulated",
    "\nrehearsed",
    "transfers\ns",
    "not\nhidden",
    "reductions\ns",
    "not\nhidden",
    "gathers\ns",
    "not\nhidden",
    "rehearsed,\nchange",
)
NOTES = """\
simulated, rehearsed: from the first to the last action of the first replica, rehearsed by the clock; of the steps the
   fastest, since what else the machine does only adds time
bubble: the part of a rank's time in which it does not compute; of each rank, where it is not the same
again: forwards that are computed again, on the rank that spends most on them
transfers, reductions, gathers: seconds that links took for messages between stages, for gradients and rows between
   replicas, and for weights behind the first of the step; summed over the ranks that receive; not hidden: the part in
   which the receiving rank did not compute
change: against the latest line in the log of the same row and configuration on the same kind of machine"""


@dataclass(frozen=True)
class Hiding:
    """Seconds that links took, summed over ranks, and the part of it in which the rank did not compute."""

    seconds: float
    not_hidden: float


@dataclass(frozen=True)
class Rehearsed:
    """A step, as the first replica's pipeline made it.

    Attributes:
        makespan: by the clock. timeline: in the time of the streams that compute (Device).
        gathers: those behind the first one on each rank, for which nothing can be computed.
    """

    makespan: float
    timeline: Simulation
    transfers: Hiding
    reductions: Hiding
    gathers: Hiding


def measure(flags: RehearsalBenchmark) -> Iterator[Part]:
    """All schedules on the same ranks, one after another."""
    count = flags.stages * flags.replicas
    with start_row(f"of {count} ranks", RehearsalRank, flags, count) as ranks:
        ranks.ready(flags.timeout)
        layers = _layers(flags, ranks)
        yield Part([_figures(flags, name, ranks, layers) for name in flags.schedules])


def _layers(flags: RehearsalBenchmark, ranks: RankProcesses) -> list[SleepingLayer]:
    if flags.model is None:
        return flags.sleeping_layers()
    say(f"measuring the layers of {flags.model}")
    layers: list[SleepingLayer]
    (layers,) = ranks.call("measure", flags.model, flags.micro_batch_size, timeout=flags.timeout, ranks=1)
    return layers


def _figures(flags: RehearsalBenchmark, name: str, ranks: RankProcesses, layers: Sequence[SleepingLayer]) -> Figures:
    prepared: Prepared = ranks.call("prepare", name, layers, timeout=flags.timeout)[0]
    steps = [rehearsed(prepared, ranks.call("step", name, timeout=flags.timeout)) for _ in range(flags.steps)]
    say(f"{name}: " + ", ".join(f"{1e3 * each.makespan:.0f} ms" for each in steps))
    best = fastest(steps)
    if flags.pictures is not None:
        draw(prepared, best.timeline, flags.pictures)
    return {
        "row": f"rehearsal {name}",
        "schedule": prepared.schedule.name,
        "layout": prepared.layout,
        "simulated_ms": 1e3 * prepared.simulation.makespan,
        "rehearsed_ms": 1e3 * best.makespan,
        "stream_ms": 1e3 * best.timeline.makespan,
        "steps_ms": summary([1e3 * each.makespan for each in steps]),
        "simulated_bubble": bubbles(prepared.simulation),
        "rehearsed_bubble": bubbles(best.timeline),
        "simulated_again_ms": 1e3 * computed_again(prepared.simulation),
        "rehearsed_again_ms": 1e3 * computed_again(best.timeline),
        "transfers_s": asdict(best.transfers),
        "reductions_s": asdict(best.reductions),
        "gathers_s": asdict(best.gathers),
        "configuration": {**asdict(flags), "output": "", "pictures": "", "schedules": (), "row": name},
    }


def rehearsed(prepared: Prepared, steps: Sequence[RankStep]) -> Rehearsed:
    """What the ranks say of a step, put together.

    Args:
        steps: of all ranks; those of a stage's replicas follow each other.
    """
    stages = prepared.schedule.ranks
    mine = steps[:: len(steps) // stages]
    by_clock, timeline = (
        measured_simulation(prepared.schedule, [getattr(each, times) for each in mine], [0.0] * stages)
        for times in ("clock", "stream")
    )
    computing = [
        [time for action, time in zip(actions, step.stream, strict=True) if action.kind in COMPUTE]
        for actions, step in zip(prepared.schedule.actions, mine, strict=True)
    ]
    received, reduced, gathered = list[list[Moved]](), list[list[Moved]](), list[list[Moved]]()
    for actions, step in zip(prepared.schedule.actions, mine, strict=True):
        gathering = {place for place, action in enumerate(actions) if action.kind is Kind.GATHER_WEIGHTS}
        received.append([each for each in step.moved if each.what == "receive"])
        of_replicas = [each for each in step.moved if each.group in BETWEEN_REPLICAS]
        reduced.append([each for each in of_replicas if each.doing not in gathering])
        gathered.append([each for each in of_replicas if each.doing in gathering][1:])
    return Rehearsed(
        by_clock.makespan, timeline, *(hiding(moved, computing) for moved in (received, reduced, gathered))
    )


def hiding(moved: Sequence[Sequence[Moved]], computing: Sequence[Sequence[tuple[float, float]]]) -> Hiding:
    """
    Args:
        moved: what each rank received. computing: start and end of each of its computations.
    """
    seconds = sum(each.end - each.begin for row in moved for each in row)
    hidden = sum(
        max(0.0, min(each.end, end) - max(each.begin, start))
        for row, times in zip(moved, computing, strict=True)
        for each in row
        for start, end in times
    )
    return Hiding(seconds, seconds - hidden)


def fastest(steps: Sequence[Rehearsed]) -> Rehearsed:
    return min(steps, key=lambda each: each.makespan)


def bubbles(result: Simulation) -> list[float]:
    """The part of the time in which each rank does not compute."""
    return [idle / result.makespan for idle in result.idle]


def computed_again(result: Simulation) -> float:
    """Seconds of the rank that spends most on forwards that are computed again."""
    return max(
        sum(timed.end - timed.start for timed in row if timed.action.kind is Kind.RECOMPUTE) for row in result.timeline
    )


def draw(prepared: Prepared, found: Simulation, folder: Path) -> None:
    """Both as pictures, on one scale."""
    folder.mkdir(parents=True, exist_ok=True)
    span = max(found.makespan, prepared.simulation.makespan)
    for what, result in (("simulated", prepared.simulation), ("rehearsed", found)):
        path = folder / f"{prepared.schedule.name}-{what}.svg"
        write_chart(prepared.schedule, result, path, View(span, *SECONDS, what))


def report(flags: RehearsalBenchmark, lines: Sequence[Line], earlier: Sequence[Line | None]) -> str:
    what = f"{flags.layers} layers" if flags.model is None else f"the layers of {flags.model}"
    replicas = f", {flags.replicas} replicas" if flags.replicas > 1 else ""
    return (
        f"{what} asleep on {flags.stages} stages{replicas}, {flags.micro_batches} micro-batches; links of "
        f"{flags.latency_ms:g} ms and {flags.bandwidth:g} MB/s; recompute {flags.recompute}\n\n"
        f"{table_of(lines, earlier)}"
    )


def table_of(lines: Sequence[Line], earlier: Sequence[Line | None]) -> str:
    """`earlier`: for each line the one that it is compared with."""
    return table(HEADINGS, list(map(_cells, lines, earlier)))


def _cells(line: Line, last: Line | None) -> list[str]:
    asked, found = line["row"].removeprefix("rehearsal "), line["schedule"]
    return [
        asked if asked == found else f"{asked}: {found}",
        line["layout"],
        f"{line['simulated_ms']:.1f}",
        f"{line['rehearsed_ms']:.1f}",
        f"{line['rehearsed_ms'] / line['simulated_ms']:.3f}",
        *(_of_ranks([f"{share:.0%}" for share in line[f"{what}_bubble"]]) for what in ("simulated", "rehearsed")),
        *(f"{line[f'{what}_again_ms']:.0f}" for what in ("simulated", "rehearsed")),
        *(
            f"{line[what][part]:.2f}"
            for what in ("transfers_s", "reductions_s", "gathers_s")
            for part in ("seconds", "not_hidden")
        ),
        change(line, last, "rehearsed_ms"),
    ]


def _of_ranks(texts: Sequence[str]) -> str:
    """Each rank's, or what is the same on all of them."""
    return texts[0] if len(set(texts)) == 1 else "|".join(texts)


REHEARSAL = Case(RehearsalBenchmark, measure, report, NOTES)
