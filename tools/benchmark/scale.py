"""What grows with the number of ranks, stages and micro-batches, without the ranks: seconds on one core."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from megasnn.config.checks import flag
from megasnn.grid import Grid
from megasnn.schedule.named import SCHEDULES
from tools.benchmark.harness import Case, Figures, Flags, Part, say
from tools.benchmark.log import Line
from tools.benchmark.models import ModelName
from tools.benchmark.scale_parts import Checkpointed, make_groups, measure_executor, measure_schedule
from tools.benchmark.scale_plans import measure_plan
from tools.benchmark.table import change, table

MOST_TENSOR = 8
LEAST_DEPTH = 4


@dataclass(frozen=True)
class ScaleBenchmark(Flags):
    """A row for each number of ranks, three times: as a grid of tensor, data and pipeline parallel ranks, as replicas
    that share out the optimizer's state, and as devices that are planned for; and a row for each schedule of each size.
    Everything is measured once."""

    ranks: tuple[int, ...] = (8, 64, 512, 4096)
    """Numbers of ranks, powers of 8."""
    stages: tuple[int, ...] = (4, 16, 64)
    """Pipeline stages of schedules."""
    micro_batches: tuple[int, ...] = (8, 64, 512)
    """Micro-batches of schedules; sizes with fewer than stages are left out."""
    units: tuple[int, ...] = (1, 3)
    """Units of each chunk, between which forwards may be computed again."""
    schedules: tuple[str, ...] = tuple(SCHEDULES)
    """Names of schedules."""
    plan_model: ModelName = "spikformer_s"
    """What is planned for."""

    def problems(self) -> list[str]:
        wrong = [f"--ranks {each} is no power of 8, from 8 on" for each in self.ranks if not _is_power_of_8(each)]
        for name in ("stages", "micro_batches", "units"):
            wrong += [f"{flag(name)} {each} must be at least 1" for each in getattr(self, name) if each < 1]
        unknown = [name for name in self.schedules if name not in SCHEDULES]
        wrong += [f"--schedules {name} is none of {', '.join(SCHEDULES)}" for name in unknown]
        return wrong


def _is_power_of_8(number: int) -> bool:
    return number >= 8 and number & (number - 1) == 0 and (number.bit_length() - 1) % 3 == 0


def grid_of(ranks: int) -> Grid:
    """Tensor and data parallel by the cube root, 8 at most; the rest are stages."""
    side = min(MOST_TENSOR, round(ranks ** (1 / 3)))
    return Grid.fit(ranks, tensor=side, pipeline=ranks // side**2)


def measure(flags: ScaleBenchmark) -> Iterator[Part]:
    yield Part([_of_ranks(grid, owners) for ranks in flags.ranks for grid, owners in _grids(ranks)])
    yield Part([_of_plan(flags.plan_model, ranks) for ranks in flags.ranks])
    yield Part([_of_schedule(*sizes) for sizes in _sizes(flags)])
    yield Part([_of_executor(count, max(flags.units)) for count in flags.micro_batches])


def _grids(ranks: int) -> Iterator[tuple[Grid, bool]]:
    yield grid_of(ranks), False
    yield Grid(data=ranks), True


def _sizes(flags: ScaleBenchmark) -> Iterator[tuple[str, int, int, int]]:
    for stages in flags.stages:
        for micro_batches in flags.micro_batches:
            if micro_batches >= stages:
                yield from ((name, stages, micro_batches, units) for units in flags.units for name in flags.schedules)


def _of_ranks(grid: Grid, rows_have_owners: bool) -> Figures:
    say(f"{grid}")
    depth = max(LEAST_DEPTH, grid.pipeline)
    return {
        "row": f"{grid.world_size} ranks: {grid}",
        "configuration": {"part": "ranks", "grid": str(grid), "depth": depth, "rows_have_owners": rows_have_owners},
        **make_groups(grid),
        **Checkpointed(grid, depth, rows_have_owners).measure(),
    }


def _of_plan(model: ModelName, ranks: int) -> Figures:
    say(f"plan for {ranks} devices")
    return {
        "row": f"plan for {ranks} devices",
        "configuration": {"part": "plan", "model": model, "ranks": ranks},
        **measure_plan(model, ranks),
    }


def _of_schedule(name: str, stages: int, micro_batches: int, units: int) -> Figures:
    say(f"{name}, {stages} stages, {micro_batches} micro-batches, {units} unit(s) a chunk")
    sizes = {"name": name, "stages": stages, "micro_batches": micro_batches, "units": units}
    return {
        "row": f"{name} {stages} x {micro_batches} x {units}",
        "configuration": {"part": "schedule", **sizes},
        **measure_schedule(name, stages, micro_batches, units),
    }


def _of_executor(micro_batches: int, units: int) -> Figures:
    return {
        "row": f"executor, {micro_batches} micro-batches, {units} unit(s)",
        "configuration": {"part": "executor", "micro_batches": micro_batches, "units": units},
        **measure_executor(micro_batches, units),
    }


_COLUMNS: dict[str, dict[str, str]] = {
    "ranks": {
        "group_calls": "groups\nmade", "groups_s": "making\nthem, s", "groups_mb": "MB", "communicators": "started",
        "describe_s": "describe\na rank, s", "told_mb": "told to the\nfirst, MB", "join_s": "join\nit, s",
        "pieces": "pieces", "reading_s": "plan a\nload, s",
    },
    "plan": {
        "layouts": "layouts", "without_reason": "without\na reason", "simulated": "simulated", "plan_s": "s",
        "plan": "plan",
    },
    "schedule": {
        "actions": "actions", "order_s": "order, s", "transfers_s": "transfers,\ns", "units_s": "units, s",
        "validate_s": "validate,\ns", "simulate_s": "simulate,\ns", "total_s": "together,\ns", "memory_s": "memory, s",
    },
    "executor": {"actions": "actions", "seconds": "s", "per_second": "actions/s"},
}  # fmt: skip
_COMPARED = {"ranks": "reading_s", "plan": "plan_s", "schedule": "total_s", "executor": "seconds"}


def report(flags: ScaleBenchmark, lines: Sequence[Line], earlier: Sequence[Line | None]) -> str:
    part = lines[0]["configuration"]["part"]
    columns = _COLUMNS[part]
    rows = [
        [line["row"], *(_cell(line[name]) for name in columns), change(line, last, _COMPARED[part])]
        for line, last in zip(lines, earlier, strict=True)
    ]
    return f"{lines[0]['machine']['cpu']}, one core\n\n{table(('', *columns.values(), 'change'), rows)}"


def _cell(value: float | str) -> str:
    if isinstance(value, str):
        return value
    return f"{value:,}" if isinstance(value, int) else f"{value:,.0f}" if value >= 1000 else f"{value:.2f}"


SCALE = Case(
    ScaleBenchmark,
    measure,
    report,
    "change: of planning a load, of a plan, of a schedule together and of a step, against the latest run alike.",
)
