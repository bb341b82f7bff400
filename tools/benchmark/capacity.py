"""The largest micro-batch, image or depth that fits in a given memory on each layout: by trying, and foreseen.

Each try builds the model in processes of its own and takes real steps, whose tensors are counted; nothing is driven to
where memory ends. Tries begin at the foreseen size, and double their distance until one fits and another does not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache, lru_cache

from megasnn.planner.analysis import Analysis
from megasnn.planner.cluster import Cluster
from megasnn.planner.layout import Layout
from megasnn.planner.machines import DEVICES
from megasnn.planner.plan import plan
from megasnn.planner.step import Predictor
from tools.benchmark.capacity_flags import PLANS, CapacityBenchmark
from tools.benchmark.harness import Case, Figures, Part, say
from tools.benchmark.log import Line
from tools.benchmark.ranks import RankProcesses, start_row
from tools.benchmark.steps_rank import StepsRank, Tried
from tools.benchmark.table import change, shown, table
from tools.benchmark.two_ranks import LAYOUTS, RANKS, UNLIMITED, Run, cluster_of

MB = 1e-6
HEADINGS = (
    "layout", "largest\nby trying", "largest\nforeseen", "counted\nMB", "foreseen\nMB", "next size,\ncounted MB",
    "samples\na step", "step\nms", "samples\nper s", "tries", "largest,\nchange",
)  # fmt: skip
NOTES = """\
MB: tensors of the rank that takes most, images aside, at the largest size by trying; the next size is too large
step: one, at that size
change: of the largest by trying, against the latest line in the log of the same row and configuration"""


@dataclass(frozen=True)
class Found:
    """
    Attributes:
        size: the largest that fits; 0 where none does. foreseen: the same by the planner.
        tried: what was tried, by size: the rank that took most.
        foreseen_bytes: of each size that was tried.
    """

    size: int
    foreseen: int
    tried: Mapping[int, Tried]
    foreseen_bytes: Mapping[int, float]


def largest(fits: Callable[[int], bool], sizes: Sequence[int], start: int) -> int:
    """The largest of ascending sizes that fits, where all smaller ones do; 0 where none does.

    Args:
        start: a guess. Sizes further and further from it are tried until one fits and another does not.
    """
    low, high = -1, len(sizes)  # the first is known to fit, the second is known not to
    at = min(max(0, sum(size <= start for size in sizes) - 1), len(sizes) - 1)
    distance = 1
    while high - low > 1:
        if fits(sizes[at]):
            low = at
        else:
            high = at
        if low >= 0 and high < len(sizes):
            at = (low + high) // 2
        else:
            at = min(low + distance, high - 1) if low >= 0 else max(high - distance, low + 1)
            distance *= 2
    return sizes[low] if low >= 0 else 0


def find(flags: CapacityBenchmark, layout: Layout, ranks: RankProcesses) -> Found:
    """The largest size on a layout. Args: ranks: of `StepsRank`, as many as the layout has or more."""
    sizes = flags.sizes(layout)
    tried: dict[int, Tried] = {}

    @cache
    def foreseen(size: int) -> float:
        return _foreseen(flags, layout, size)

    def fits(size: int) -> bool:
        run, bounds = flags.run(size), _predictor(flags, size).bounds(layout)
        parallel = layout.parallel(run.configuration().parallel, bounds)
        taken = ranks.call("tried", run, parallel, layout.ranks, timeout=flags.timeout)
        tried[size] = max(taken[: layout.ranks], key=lambda each: each.bytes)
        say(f"  {size}: {MB * tried[size].bytes:.0f} MB", end="")
        return tried[size].bytes <= flags.memory / MB

    guess = largest(lambda size: foreseen(size) <= flags.memory / MB, sizes, sizes[0])
    found = largest(fits, sizes, guess)
    say("")
    return Found(found, guess, tried, {size: foreseen(size) for size in tried})


def _foreseen(flags: CapacityBenchmark, layout: Layout, size: int) -> float:
    """Bytes of the tensors of the rank that needs most, images aside."""
    memory = _predictor(flags, size).predict(layout).memory
    return max((each.total - each.program - each.samples) / MB for each in memory)


@lru_cache(maxsize=16)
def _predictor(flags: CapacityBenchmark, size: int) -> Predictor:
    run = flags.run(size)
    # Bytes are counted for few samples, and scaled: a size of micro-batches needs no analysis of its own.
    counted = _counted(flags.usual() if flags.grows == "micro-batch" else run)
    return Predictor(counted, run.configuration(), _cluster())


@lru_cache(maxsize=16)
def _counted(run: Run) -> Analysis:
    return run.counted()


def _cluster(memory: float = UNLIMITED) -> Cluster:
    """Args: memory: bytes of each rank for tensors."""
    machine = DEVICES["cpu-core"].machine("cpu-core", "fp32")
    return cluster_of(machine, memory + machine.program)


def layout_of(flags: CapacityBenchmark, name: str) -> Layout:
    """Of the table, or what the planner takes for the usual size. Raises PlanError where nothing fits."""
    if name in LAYOUTS:
        return LAYOUTS[name]
    run = flags.usual()
    return plan(_counted(run), run.configuration(), _cluster(flags.memory / MB), PLANS[name]).layout


def measure(flags: CapacityBenchmark) -> Iterator[Part]:
    with start_row("of capacity", StepsRank, None, RANKS) as ranks:
        ranks.ready(flags.timeout)
        lines = []
        for name in flags.layouts:
            layout = layout_of(flags, name)
            say(f"{name}: {layout}")
            lines.append(_figures(flags, name, layout, find(flags, layout, ranks)))
    yield Part(lines)


def _figures(flags: CapacityBenchmark, name: str, layout: Layout, found: Found) -> Figures:
    samples = flags.run(found.size).samples if found.size else 0
    at, above = found.tried.get(found.size), min((size for size in found.tried if size > found.size), default=None)
    rate = samples / at.seconds if at else None
    return {
        "row": f"capacity {name}",
        "regime": "capacity",
        "layout": str(layout),
        "replicas": layout.grid.replicas,
        "largest": found.size,
        "largest_foreseen": found.foreseen,
        "counted_mb": at and MB * at.bytes,
        "foreseen_mb": MB * found.foreseen_bytes[found.size] if at else None,
        "next_counted_mb": MB * found.tried[above].bytes if above else None,
        "tried_mb": {str(size): MB * found.tried[size].bytes for size in sorted(found.tried)},
        "samples": samples,
        "samples_per_rank": samples / layout.ranks,
        "step_ms": at and 1e3 * at.seconds,
        "samples_per_s": rate,
        "samples_per_s_per_rank": rate and rate / layout.ranks,
        "configuration": {**asdict(flags), "case": "capacity", "output": "", "layouts": (), "timeout": 0, "row": name},
    }


def report(flags: CapacityBenchmark, lines: Sequence[Line], earlier: Sequence[Line | None]) -> str:
    rows = [
        [
            line["row"].removeprefix("capacity ") + (f" ({line['layout']})" if "plan" in line["row"] else ""),
            str(line["largest"]),
            str(line["largest_foreseen"]),
            *(shown(line[name]) for name in ("counted_mb", "foreseen_mb", "next_counted_mb")),
            str(line["samples"]),
            shown(line["step_ms"], ".0f"),
            shown(line["samples_per_s"]),
            str(len(line["tried_mb"])),
            change(line, last, "largest"),
        ]
        for line, last in zip(lines, earlier, strict=True)
    ]
    return (
        f"{flags.model}, the largest {flags.grows} of which tensors take no more than {flags.memory:g} MB a rank; "
        f"{flags.micro_batches} micro-batches, {lines[0]['machine']['cpu']}\n\n{table(HEADINGS, rows)}"
    )


CAPACITY = Case(CapacityBenchmark, measure, report, NOTES)
