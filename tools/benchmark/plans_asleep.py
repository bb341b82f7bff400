"""Whole steps of layouts as ranks that sleep take them, beside what the planner foresees, and the plan beside the best.

What ranks sleep and what links take is what the planner is told, so that each miss is the planner's.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from statistics import median

from megasnn.planner.layout import Layout
from megasnn.planner.plan import Plan, plan
from megasnn.planner.predicted import Predicted
from megasnn.planner.step import Predictor
from megasnn.schedule.refine import NEVER
from tools.benchmark.harness import Case, Figures, Part, rounds, say, summary
from tools.benchmark.log import Line
from tools.benchmark.plans_asleep_flags import SleepingPlansBenchmark, buckets_of
from tools.benchmark.plans_asleep_rank import PlansAsleepRank, Whole, slowest
from tools.benchmark.ranks import RankProcesses, start_row
from tools.benchmark.table import change, table, with_extremes

HEADINGS = (
    "layout",
    "why",
    "predicted\nms",
    "stream\nms",
    "stream/\npredicted",
    "by the clock\nms",
    "clock/\npredicted",
    "clock,\nchange",
)
NOTES = """\
predicted: the whole step, as the planner simulates it from the seconds and bytes that ranks sleep and links take
stream: rehearsed, from the first forward until all have the new rows of all, in the time of the stream that computes;
   median of the steps of all rounds, of which each goes through all layouts, on the slowest rank
by the clock: the same as the clock has it, with what else the machine does, and its cores share among the ranks
why: the plan; one of the best as the planner ranks them; or the best of its kind; one device is always there
change: against the latest line in the log of the same row and configuration on the same kind of machine"""


@dataclass(frozen=True)
class Tried:
    """A layout that is rehearsed. why: what it is there for."""

    layout: Layout
    predicted: Predicted
    why: str


def measure(flags: SleepingPlansBenchmark) -> Iterator[Part]:
    for count in flags.ranks:
        with buckets_of(round(1e3 * flags.bucket_kb)):
            found = plan(flags.analysis(), flags.configuration(), flags.cluster(count))
            tried = to_try(flags, found, count)
        say(f"{count} ranks: {len(tried)} layouts; the plan is {found.layout}")
        taken = _taken(flags, tried)
        yield Part([_figures(flags, count, each, taken[each.layout]) for each in tried])


def to_try(flags: SleepingPlansBenchmark, found: Plan, ranks: int) -> list[Tried]:
    """The plan, the best of all others as the planner ranks them, the best of each kind, and one device."""
    predictor = Predictor(flags.analysis(), flags.configuration(), flags.cluster(ranks))
    whys, kinds = {found.layout: "plan"}, set(_kinds(found.layout))
    for each in found.candidates[1:]:
        if each.seconds is None:
            continue
        new = [kind for kind in _kinds(each.layout) if kind not in kinds]
        if len(whys) < flags.best:
            whys[each.layout] = "best"
        elif new:
            whys[each.layout] = new[0]
        if each.layout in whys:
            kinds.update(new)
    return [Tried(layout, predictor.predict(layout), why) for layout, why in whys.items()]


def _kinds(layout: Layout) -> Iterator[str]:
    """What one of each is tried of."""
    grid = layout.grid
    if layout.ranks == 1:
        if layout.recompute == NEVER:
            yield "one device"
        return
    if grid.pipeline > 1:
        yield f"{layout.schedule} {layout.chunks}"
        yield "pipeline x data" if grid.replicas > 1 else "pipeline"
        yield from ["pipeline x weight"] * (grid.weight > 1)
    else:
        yield "weight" if grid.weight > 1 else "data"
    sharded = " sharded" * layout.shards_optimizer
    yield f"recompute {layout.recompute}{sharded}"


def _taken(flags: SleepingPlansBenchmark, tried: Sequence[Tried]) -> dict[Layout, list[Whole]]:
    """Of each layout, the steps of all rounds, each on its slowest rank."""
    taken: dict[Layout, list[Whole]] = {each.layout: [] for each in tried}
    with ExitStack() as at_end:
        rows: dict[int, RankProcesses] = {}
        for count in sorted({each.layout.ranks for each in tried}):
            rows[count] = at_end.enter_context(start_row(f"of {count} ranks", PlansAsleepRank, flags, count))
            rows[count].ready(flags.timeout)
        for _ in rounds(flags.rounds):
            for each in tried:
                ranks = rows[each.layout.ranks]
                of_ranks = ranks.call("steps", each.layout, each.predicted.bounds, timeout=flags.timeout)
                taken[each.layout] += slowest(of_ranks)
    return taken


def _figures(flags: SleepingPlansBenchmark, ranks: int, tried: Tried, taken: Sequence[Whole]) -> Figures:
    time = tried.predicted.time
    return {
        "row": f"sleeping plans {ranks}: {tried.layout}",
        "ranks": ranks,
        "layout": str(tried.layout),
        "devices": tried.layout.ranks,
        "why": tried.why,
        "predicted_ms": 1e3 * time.total,
        "parts_ms": {part: 1e3 * value for part, value in asdict(time).items()},
        "stream_ms": 1e3 * median(each.stream for each in taken),
        "clock_ms": summary([1e3 * each.clock for each in taken]),
        "configuration": {**asdict(flags), "output": "", "ranks": ranks, "best": 0, "row": str(tried.layout)},
    }


def report(flags: SleepingPlansBenchmark, lines: Sequence[Line], earlier: Sequence[Line | None]) -> str:
    rows = [
        [
            line["layout"],
            line["why"],
            f"{line['predicted_ms']:.1f}",
            f"{line['stream_ms']:.1f}",
            f"{line['stream_ms'] / line['predicted_ms']:.3f}",
            with_extremes(line["clock_ms"]),
            f"{line['clock_ms']['median'] / line['predicted_ms']:.3f}",
            change(line, last, "clock_ms", "median"),
        ]
        for line, last in zip(lines, earlier, strict=True)
    ]
    chosen = next(line for line in lines if line["why"] == "plan")
    return (
        f"{lines[0]['ranks']} ranks; {flags.layers} layers asleep, {flags.micro_batches} micro-batches; links of "
        f"{flags.latency_ms:g} ms and {flags.bandwidth:g} MB/s; all that takes {flags.slower:g} times as long\n\n"
        f"{table(HEADINGS, rows)}\n\n"
        f"plan: {chosen['layout']}\n{_beside_best(lines, chosen)}"
    )


def _beside_best(lines: Sequence[Line], chosen: Line) -> str:
    """The plan beside the best of all, and beside one device."""

    def stream(line: Line) -> float:
        return float(line["stream_ms"])

    def clock(line: Line) -> float:
        return float(line["clock_ms"]["median"])

    texts = []
    for what, of in (("stream", stream), ("clock", clock)):
        best = min(lines, key=of)
        one = [of(line) for line in lines if line["devices"] == 1]
        alone = f"; one device takes {min(one) / of(chosen):.2f} times as long" if one else ""
        texts.append(
            f"by the {what} it takes {of(chosen) / of(best):.3f} times as long as the best: {best['layout']}{alone}"
        )
    return "\n".join(texts)


SLEEPING_PLANS = Case(SleepingPlansBenchmark, measure, report, NOTES)
