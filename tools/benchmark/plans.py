"""Steps of real ranks on many layouts, beside the time and the memory that the planner foresees of each."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import asdict, replace
from statistics import median

from megasnn.config import PretrainConfig
from megasnn.planner.analysis import Analysis
from megasnn.planner.cluster import Cluster
from megasnn.planner.plan import plan
from megasnn.planner.step import Predicted, Predictor
from tools.benchmark.harness import Case, Figures, Part, rounds, say, summary
from tools.benchmark.log import Line
from tools.benchmark.plans_flags import LAYOUTS, RANKS, PlansBenchmark
from tools.benchmark.plans_rank import PlansRank, Taken
from tools.benchmark.ranks import RankProcesses, start_row
from tools.benchmark.table import change, table

HEADINGS = (
    "layout",
    "predicted\nms",
    "measured\nms",
    "measured/\npredicted",
    "predicted\nMB",
    "counted\nMB",
    "counted/\npredicted",
    "measured,\nchange",
)
NOTES = """\
predicted: by the planner, from layers that were measured on one rank and on two before the first step
measured: median of the steps of all rounds, of which each goes through all layouts, on the slower rank
MB: of the rank that needs most in a step, above weights, gradients and optimizer state; counted as it is allocated
plan: what the planner takes of all layouts that it knows of, for one rank and for two
change: against the latest line in the log of the same row and configuration on the same kind of machine"""


def measure(flags: PlansBenchmark) -> Iterator[Part]:
    config = flags.configuration()
    with tempfile.TemporaryDirectory(prefix="megasnn-benchmark-") as folder:
        with closing(start_row("of the planner", PlansRank, flags, RANKS, 1, f"{folder}/store")) as ranks:
            ranks.ready(flags.timeout)
            say("measuring the layers")
            analysis: Analysis = ranks.call("analyse", timeout=flags.timeout)[0]
            assert analysis.machine is not None
            cluster = Cluster(RANKS, RANKS, replace(analysis.machine, memory=1e12))
            predictor = Predictor(analysis, config, cluster)
            predicted = {name: predictor.predict(LAYOUTS[name]) for name in flags.layouts}
            taken = _taken(flags, config, ranks, predicted)
    chosen = plan(analysis, config, cluster).layout
    for name, each in predicted.items():
        say(f"{name}: {each.time}")
    yield Part([_figures(flags, name, predicted[name], taken[name], str(chosen)) for name in flags.layouts])


def _taken(
    flags: PlansBenchmark, config: PretrainConfig, ranks: RankProcesses, predicted: dict[str, Predicted]
) -> dict[str, list[list[Taken]]]:
    """Of each layout, in each round, what each of its ranks has taken."""
    taken: dict[str, list[list[Taken]]] = {name: [] for name in predicted}
    for number in rounds(flags.rounds):
        for name, each in predicted.items():
            layout = LAYOUTS[name]
            parallel = layout.parallel(config.parallel, each.bounds)
            found = ranks.call("steps", parallel, layout.ranks, flags.steps, number == 1, timeout=flags.timeout)
            taken[name].append(found[: layout.ranks])
            say(f"  {name} {1e3 * median(max(times) for times in _by_step(taken[name][-1])):.0f} ms", end="")
        say("")
    return taken


def _by_step(ranks: Sequence[Taken]) -> list[tuple[float, ...]]:
    return list(zip(*(each.seconds for each in ranks), strict=True))


def _figures(
    flags: PlansBenchmark, name: str, predicted: Predicted, taken: Sequence[Sequence[Taken]], chosen: str
) -> Figures:
    times = summary([1e3 * max(step) for turn in taken for step in _by_step(turn)])
    counted = max(each.bytes for each in taken[0])
    foreseen = max(each.kept + each.working + each.messages for each in predicted.memory)
    return {
        "row": f"plans {name}",
        "layout": str(LAYOUTS[name]),
        "layers": [len(span) for span in predicted.bounds],
        "predicted_ms": 1e3 * predicted.time.total,
        "parts_ms": {part: 1e3 * value for part, value in asdict(predicted.time).items()},
        "step_ms": times,
        "predicted_mb": foreseen,
        "counted_mb": 1e-6 * counted,
        "plan": chosen,
        "configuration": {**asdict(flags), "output": "", "layouts": (), "row": name},
    }


def report(flags: PlansBenchmark, lines: Sequence[Line], earlier: Sequence[Line | None]) -> str:
    rows = [
        [
            line["row"].removeprefix("plans "),
            f"{line['predicted_ms']:.0f}",
            f"{line['step_ms']['median']:.0f} ({line['step_ms']['min']:.0f}..{line['step_ms']['max']:.0f})",
            f"{line['step_ms']['median'] / line['predicted_ms']:.3f}",
            f"{line['predicted_mb']:.1f}",
            f"{line['counted_mb']:.1f}",
            f"{line['counted_mb'] / line['predicted_mb']:.3f}",
            change(line, last, "step_ms", "median"),
        ]
        for line, last in zip(lines, earlier, strict=True)
    ]
    best = min(lines, key=lambda line: line["step_ms"]["median"])
    return (
        f"{flags.model}, {flags.micro_batches} micro-batches of {flags.micro_batch_size}\n\n{table(HEADINGS, rows)}\n\n"
        f"plan: {lines[0]['plan']}; the fastest measured: {best['layout']}"
    )


PLANS = Case(PlansBenchmark, measure, report, NOTES)
