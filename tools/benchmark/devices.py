"""Steps of both models on many layouts; shares of a device's peak rates fitted to half of them, the others foreseen.

What is fitted is an entry of the table of devices (megasnn/planner/machines.py). Which half follows from the names of
the rows, before anything is measured.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from statistics import median

from megasnn.config.checks import above, at_least
from megasnn.planner.machines import REACHED, Reached
from tools.benchmark.devices_fit import DEVICE, Example, fitted, foreseen
from tools.benchmark.harness import Case, Figures, Flags, Part, rounds, say, summary
from tools.benchmark.log import Line, latest_alike, read_lines, surroundings
from tools.benchmark.models import ModelName, dimensions_of
from tools.benchmark.ranks import RankProcesses, start_row
from tools.benchmark.steps_rank import StepsRank, slowest
from tools.benchmark.table import change, quartiles, table
from tools.benchmark.two_ranks import LAYOUTS, RANKS, Run, unknown_layouts

MODELS: tuple[ModelName, ...] = "spikformer_cifar10", "vgg_dvs"
HEADINGS = (
    "row", "measured\nms", "quartiles", "fitted", "foreseen\nms", "foreseen /\nmeasured", "by the\ntable", "change",
)  # fmt: skip
NOTES = """\
fitted: whether the shares are fitted to this row; the others are foreseen with them
by the table: foreseen / measured with the shares that the table of devices has
change: of the measured median"""


@dataclass(frozen=True)
class DeviceBenchmark(Flags):
    """Shares of a CPU core's peak rates, fitted to half of the measured layouts of one rank and of two."""

    models: tuple[ModelName, ...] = MODELS
    """As for --pipeline."""
    sizes: tuple[int, ...] = (2, 4)
    """Samples of a micro-batch; each is measured."""
    micro_batches: int = 2
    """Of a step, over all replicas."""
    layouts: tuple[str, ...] = ("one", "dp2", "tp2", "cp2", "pp2-1f1b")
    """Of those that --plans has. The rows of all models, sizes and layouts are sorted by name; the first, third and so
    on are fitted to, the others are foreseen."""
    rounds: int = 1
    """How often each layout of a model has its turn."""
    steps: int = 3
    """Timed steps of a turn; two untimed ones come before them."""
    resume: bool = False
    """Models and sizes of which the log has all rows from this machine are not measured again."""
    timeout: float = 300.0
    """Seconds that a turn may take before the benchmark gives up."""

    def problems(self) -> list[str]:
        wrong = at_least(self, 1, "micro_batches", "rounds", "steps") + above(self, 0, "timeout")
        wrong += [f"--sizes {size}: a micro-batch has a sample at least" for size in self.sizes if size < 1]
        wrong += unknown_layouts(self.layouts)
        count = len(self.models) * len(self.sizes) * len(self.layouts)
        if not wrong and count < 2:
            wrong.append(f"{count} row(s): one half is fitted to and the other is foreseen; give more --layouts")
        return wrong

    def run(self, model: ModelName, size: int) -> Run:
        return Run(dimensions_of(model), size, self.micro_batches, sparse_products="off")


def measure(flags: DeviceBenchmark) -> Iterator[Part]:
    found: dict[str, Example] = {}
    times: dict[str, dict[str, float]] = {}
    for model in flags.models:
        known = flags.run(model, 1).counted()
        for size in flags.sizes:
            config = flags.run(model, size).configuration()
            measured = flags.resume and _measured_before(flags, model, size)
            for layout, milliseconds in (measured or _times(flags, model, size)).items():
                name = f"{model} {size} {layout}"
                times[name] = milliseconds
                found[name] = Example(known, config, LAYOUTS[layout], 1e-3 * milliseconds["median"])
    names = sorted(found)
    reached = fitted([found[name] for name in names[::2]])
    yield Part([_figures(flags, name, found[name], times[name], name in names[::2], reached) for name in names])


def _measured_before(flags: DeviceBenchmark, model: ModelName, size: int) -> dict[str, dict[str, float]] | None:
    """The latest figures of all layouts in the log; None where some lack."""
    log, machine = read_lines(flags.output), surroundings(None)["machine"]
    alike = {
        layout: latest_alike({"configuration": _configuration(flags, model, size, layout), "machine": machine}, log)
        for layout in flags.layouts
    }
    found = {layout: line["step_ms"] for layout, line in alike.items() if line is not None}
    return found if len(found) == len(flags.layouts) else None


def _configuration(flags: DeviceBenchmark, model: str, size: int, layout: str) -> Figures:
    shape = {"micro_batch_size": size, "micro_batches": flags.micro_batches}
    return {"case": "devices", "model": model, "layout": layout, **shape}


def _times(flags: DeviceBenchmark, model: ModelName, size: int) -> dict[str, dict[str, float]]:
    """Milliseconds of the steps on each layout, on its slowest rank."""
    run = flags.run(model, size)
    found: dict[str, list[float]] = {name: [] for name in flags.layouts}
    with start_row(f"{model} {size}", StepsRank, None, RANKS) as ranks:
        ranks.ready(flags.timeout)
        say(f"{model}, micro-batches of {size}")
        for _ in rounds(flags.rounds):
            for name in flags.layouts:
                found[name] += _turn(flags, run, ranks, name)
                say(f"  {name} {median(found[name]):.0f} ms", end="")
            say("")
    return {name: summary(times) for name, times in found.items()}


def _turn(flags: DeviceBenchmark, run: Run, ranks: RankProcesses, name: str) -> list[float]:
    layout = LAYOUTS[name]
    parallel = layout.parallel(run.configuration().parallel)  # a pipeline is cut as a run cuts it
    taken = ranks.call("steps", run, parallel, layout.ranks, flags.steps, False, timeout=flags.timeout)
    return [1e3 * seconds for seconds in slowest(taken[: layout.ranks])]


def _figures(
    flags: DeviceBenchmark, name: str, example: Example, times: Figures, is_fitted: bool, reached: Reached
) -> Figures:
    model, size, layout = name.split()
    return {
        "row": f"devices {name}",
        "step_ms": times,
        "fitted_to": is_fitted,
        "foreseen_ms": 1e3 * foreseen(example, reached),
        "by_the_table_ms": 1e3 * foreseen(example, REACHED["cpu"]),
        "reached": asdict(reached),
        "device": DEVICE,
        "configuration": _configuration(flags, model, int(size), layout),
    }


def report(flags: DeviceBenchmark, lines: Sequence[Line], earlier: Sequence[Line | None]) -> str:
    rows = [
        [
            line["row"].removeprefix("devices "),
            f"{line['step_ms']['median']:.0f}",
            quartiles(line["step_ms"], ".0f"),
            "yes" if line["fitted_to"] else "",
            f"{line['foreseen_ms']:.0f}",
            f"{line['foreseen_ms'] / line['step_ms']['median']:.3f}",
            f"{line['by_the_table_ms'] / line['step_ms']['median']:.3f}",
            change(line, last, "step_ms", "median"),
        ]
        for line, last in zip(lines, earlier, strict=True)
    ]
    reached = ", ".join(f"{name} {value:.3g}" for name, value in lines[0]["reached"].items() if name != "told")
    return (
        f"{lines[0]['device']}: {lines[0]['machine']['cpu']}; {flags.micro_batches} micro-batches\n\n"
        f"{table(HEADINGS, rows)}\n\nfitted: {reached}\n{_errors(lines, True)}\n{_errors(lines, False)}"
    )


def _errors(lines: Sequence[Line], fitted_to: bool) -> str:
    errors = [
        abs(line["foreseen_ms"] / line["step_ms"]["median"] - 1) for line in lines if line["fitted_to"] is fitted_to
    ]
    what = "fitted to" if fitted_to else "foreseen"
    return f"{what}: {len(errors)} rows, error {median(errors):.1%} in the middle, {max(errors):.1%} at most"


DEVICES = Case(DeviceBenchmark, measure, report, NOTES)
