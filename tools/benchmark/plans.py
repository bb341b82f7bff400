"""Steps of real ranks on many layouts, beside the time and the memory that the planner foresees of each."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

from megasnn.config.checks import above, at_least
from megasnn.grid import Grid
from megasnn.planner.analysis import Analysis, write
from megasnn.planner.candidates import Prefer
from megasnn.planner.layout import Layout
from megasnn.planner.plan import plan
from megasnn.planner.predicted import Predicted
from megasnn.planner.step import Predictor
from tools.benchmark.harness import Case, Figures, Flags, Part, rounds, say, summary
from tools.benchmark.log import Line
from tools.benchmark.models import ModelName, dimensions_of
from tools.benchmark.ranks import RankProcesses, start_row
from tools.benchmark.steps_rank import StepsRank, Taken, slowest
from tools.benchmark.table import change, table, with_extremes
from tools.benchmark.two_ranks import LAYOUTS, RANKS, Run, cluster_of, unknown_layouts

PREFER: tuple[Prefer, ...] = "speed", "memory"
HEADINGS = (
    "layout",
    "predicted\nms",
    "measured\nms",
    "measured/\npredicted",
    "predicted\nMB",
    "counted\nMB",
    "counted/\npredicted",
    "all tensors\nMB",
    "measured,\nchange",
)
NOTES = """\
predicted: by the planner, from layers that were measured on one rank and on two before the first step
measured: median of the steps of all rounds, of which each goes through all layouts, on the slower rank
MB: of the rank that needs most in a step, above weights, gradients and optimizer state; counted as it is allocated
plan: what the planner takes of all layouts that it knows of, for one rank and for two; of the slowest of its ranks, and
   of the one that needs most, with weights, gradients and optimizer state
change: against the latest line in the log of the same row and configuration on the same kind of machine"""


@dataclass(frozen=True)
class PlansBenchmark(Flags):
    """What the planner foresees, beside what two ranks take."""

    model: ModelName = "spikformer_cifar10"
    """As for --pipeline."""
    micro_batch_size: int = 4
    """Samples of a micro-batch."""
    micro_batches: int = 4
    """Of a step, over all replicas."""
    layouts: tuple[str, ...] = tuple(LAYOUTS)
    """Some of them."""
    rounds: int = 5
    """How often each layout has its turn."""
    steps: int = 1
    """Timed steps of a turn; two untimed ones come before them."""
    timeout: float = 300.0
    """Seconds that a turn may take before the benchmark gives up."""

    def problems(self) -> list[str]:
        wrong = at_least(self, 1, "micro_batch_size", "micro_batches", "rounds", "steps") + above(self, 0, "timeout")
        wrong += unknown_layouts(self.layouts)
        for name in self.layouts:
            layout = LAYOUTS.get(name, Layout(Grid()))
            if layout.cut == "samples" and layout.grid.context > self.micro_batch_size > 0:
                wrong.append(
                    f"--micro-batch-size {self.micro_batch_size} is too small for {name}, where each of "
                    f"{layout.grid.context} ranks needs a sample: raise it, or leave {name} out of --layouts"
                )
        return wrong

    @property
    def run(self) -> Run:
        return Run(dimensions_of(self.model), self.micro_batch_size, self.micro_batches)


def measure(flags: PlansBenchmark) -> Iterator[Part]:
    config = flags.run.configuration()
    with start_row("of the planner", StepsRank, None, RANKS) as ranks, TemporaryDirectory() as folder:
        ranks.ready(flags.timeout)
        say("measuring the layers")
        analysis: Analysis = ranks.call("analyse", flags.run, timeout=flags.timeout)[0]
        assert analysis.machine is not None
        cluster = cluster_of(analysis.machine)
        predictor = Predictor(analysis, config, cluster)
        chosen: dict[Prefer, Layout] = {name: plan(analysis, config, cluster, name).layout for name in PREFER}
        layouts = {name: LAYOUTS[name] for name in flags.layouts}
        layouts |= {f"plan-{name}": each for name, each in chosen.items() if each not in layouts.values()}
        predicted = {name: predictor.predict(each) for name, each in layouts.items()}
        costs = Path(folder, "costs.json")
        write(analysis, costs)
        taken = _taken(flags, ranks, layouts, predicted, costs)
    for name, each in predicted.items():
        say(f"{name}: {each.time}")
    told = {layout: [name for name, each in chosen.items() if each == layout] for layout in layouts.values()}
    yield Part(
        [_figures(flags, name, each, told[each], predicted[name], taken[name]) for name, each in layouts.items()]
    )


def _taken(
    flags: PlansBenchmark,
    ranks: RankProcesses,
    layouts: Mapping[str, Layout],
    predicted: Mapping[str, Predicted],
    costs: Path,
) -> dict[str, list[list[Taken]]]:
    """Of each layout, in each round, what each of its ranks has taken. Args: costs: the file of the plan."""
    run, usual = flags.run, flags.run.configuration().parallel
    taken: dict[str, list[list[Taken]]] = {name: [] for name in layouts}
    for number in rounds(flags.rounds):
        for name, layout in layouts.items():
            parallel = layout.parallel(usual, predicted[name].bounds, costs)
            found = ranks.call("steps", run, parallel, layout.ranks, flags.steps, number == 1, timeout=flags.timeout)
            taken[name].append(found[: layout.ranks])
            say(f"  {name} {1e3 * median(slowest(taken[name][-1])):.0f} ms", end="")
        say("")
    return taken


def _figures(
    flags: PlansBenchmark,
    name: str,
    layout: Layout,
    chosen: Sequence[Prefer],
    predicted: Predicted,
    taken: Sequence[Sequence[Taken]],
) -> Figures:
    """Args: chosen: the preferences of which the layout is the plan."""
    times = summary([1e3 * seconds for turn in taken for seconds in slowest(turn)])
    needs = [each.gathered + each.kept + each.working + each.messages for each in predicted.memory]
    return {
        "row": f"plans {name}",
        "layout": str(layout),
        "layers": [len(span) for span in predicted.bounds],
        "plan_of": list(chosen),
        "predicted_ms": 1e3 * predicted.time.total,
        "parts_ms": {part: 1e3 * value for part, value in asdict(predicted.time).items()},
        "step_ms": times,
        "predicted_mb": max(needs),
        "counted_mb": 1e-6 * max(each.needed for each in taken[0]),
        "all_tensors_mb": 1e-6 * max(each.needed + each.held for each in taken[0]),
        "configuration": {**asdict(flags), "output": "", "layouts": (), "row": name},
    }


def report(flags: PlansBenchmark, lines: Sequence[Line], earlier: Sequence[Line | None]) -> str:
    rows = [
        [
            line["row"].removeprefix("plans "),
            f"{line['predicted_ms']:.0f}",
            with_extremes(line["step_ms"]),
            f"{line['step_ms']['median'] / line['predicted_ms']:.3f}",
            f"{line['predicted_mb']:.1f}",
            f"{line['counted_mb']:.1f}",
            f"{line['counted_mb'] / line['predicted_mb']:.3f}",
            f"{line['all_tensors_mb']:.1f}",
            change(line, last, "step_ms", "median"),
        ]
        for line, last in zip(lines, earlier, strict=True)
    ]
    return (
        f"{flags.model}, {flags.micro_batches} micro-batches of {flags.micro_batch_size}\n\n{table(HEADINGS, rows)}\n\n"
        + "\n".join(told_of_plans(lines))
    )


def told_of_plans(lines: Sequence[Line]) -> Iterator[str]:
    """How the plans compare with the best of all rows."""
    fastest = min(lines, key=lambda line: line["step_ms"]["median"])
    smallest = min(lines, key=lambda line: line["all_tensors_mb"])
    for line in lines:
        for prefer in line["plan_of"]:
            yield (
                f"plan for {prefer}: {line['layout']}; {line['step_ms']['median'] / fastest['step_ms']['median']:.3f} "
                f"times the step of the fastest row ({fastest['layout']}), {line['all_tensors_mb']:.1f} MB of tensors, "
                f"{line['all_tensors_mb'] / smallest['all_tensors_mb']:.3f} times the smallest ({smallest['layout']})"
            )


PLANS = Case(PlansBenchmark, measure, report, NOTES)
