"""What a training step takes in memory, counted allocation by allocation, beside what was predicted, and its time.

SpikingJelly with and without its own memory optimisation, and MegaSNN with forwards that are computed again. Counted is
what is there at the peak above parameters, gradients and optimizer state. Counting takes time: the steps that are
counted are not those that are timed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from statistics import median
from typing import Literal

from megasnn.config.checks import above, at_least
from megasnn.schedule.refine import NEVER
from tools.benchmark.harness import Case, Figures, Flags, Part, ratios, rounds, say, summary
from tools.benchmark.log import Line
from tools.benchmark.memory_rank import MemoryRank, MemoryRow, MemoryWork
from tools.benchmark.models import Dimensions, SpikingJellyName, dimensions_of
from tools.benchmark.ranks import RankProcesses, start_row
from tools.benchmark.table import change, quartiles, shown, table

MB = 1e-6
SPIKINGJELLY = "spikingjelly"
HEADINGS = (
    "row", "counted\nMB", "of Spiking-\nJelly's", "predicted\nMB", "predicted /\ncounted", "step\nms", "x never",
    "quartiles", "change",
)  # fmt: skip
NOTES = """\
step: on a CPU, the time of the processor
of several ranks: memory of the one that takes most, time of the first; x never: median of the rounds
change: of what is counted"""


@dataclass(frozen=True)
class MemoryBenchmark(Flags):
    """A row for each way to train the same model."""

    model: SpikingJellyName = "spikformer_cifar10"
    """Model of SpikingJelly."""
    micro_batch_size: int = 32
    """Samples in a micro-batch."""
    micro_batches: int = 1
    """Micro-batches of a replica in a step. SpikingJelly takes all samples in one go."""
    memory_budget: float | None = None
    """MB; a row with --memory-budget more."""
    ranks: int = 1
    """With 2 or more: further rows with so many data parallel replicas, with the plain and the sharded optimizer."""
    only: tuple[str, ...] = ()
    """Of the rows beside SpikingJelly's and never, those that are measured, by name; by default all."""
    device: Literal["cpu", "cuda"] = "cpu"
    """cuda needs a GPU for each rank."""
    rounds: int = 5
    """How often each row has its turn."""
    steps: int = 1
    """Timed steps of a turn; one untimed step comes before them."""
    timeout: float = 600.0
    """Seconds that anything may take before the benchmark gives up."""

    def problems(self) -> list[str]:
        sizes = "micro_batch_size", "micro_batches", "ranks", "rounds", "steps"
        names = [row.name for row in self._possible_rows()]
        unknown = [name for name in self.only if name not in names]
        wrong = [f"--only: {name!r} is no row; there are {', '.join(names)}" for name in unknown]
        return wrong + at_least(self, 1, *sizes) + above(self, 0, "timeout", "memory_budget")

    def dimensions(self) -> Dimensions:
        return dimensions_of(self.model)

    def rows(self) -> list[MemoryRow]:
        """SpikingJelly's as it is, ours as it is, and others."""
        wanted = {SPIKINGJELLY, NEVER, *self.only}
        return [row for row in self._possible_rows() if not self.only or row.name in wanted]

    def _possible_rows(self) -> list[MemoryRow]:
        found = [MemoryRow(SPIKINGJELLY), MemoryRow(f"{SPIKINGJELLY} memopt", optimized=True)]
        found += [MemoryRow(mode, {"recompute": mode}) for mode in (NEVER, "except-last", "always")]
        if self.memory_budget is not None:
            found.append(MemoryRow(f"budget {self.memory_budget:g}", {"memory_budget": self.memory_budget}))
        if self.ranks > 1:
            for name, sharded in (("", False), (" sharded", True)):
                flags = {"recompute": "always", "use_distributed_optimizer": sharded}
                found.append(MemoryRow(f"always dp{self.ranks}{name}", flags, ranks=self.ranks))
        return found


@dataclass
class _Measured:
    """Of one row: bytes of the rank that takes most, and seconds of the steps of each round."""

    counted: int
    predicted: int | None
    times: list[list[float]]


def measure(flags: MemoryBenchmark) -> Iterator[Part]:
    with _started(flags) as rows:
        measured = {}
        for row, ranks in rows.items():
            say(f"counting {row}")
            counted = ranks.call("counted", timeout=flags.timeout)
            predicted = ranks.call("predicted", timeout=flags.timeout)
            rank = counted.index(max(counted))
            measured[row] = _Measured(counted[rank], predicted[rank], [])
        for _ in rounds(flags.rounds):
            for row, ranks in rows.items():
                _, *times = ranks.call("measure", 1 + flags.steps, timeout=flags.timeout)[0]
                measured[row].times.append(times)
    yield Part(_figures(flags, measured))


@contextmanager
def _started(flags: MemoryBenchmark) -> Iterator[dict[str, RankProcesses]]:
    with ExitStack() as stack:
        rows = {}
        for row in flags.rows():
            work = MemoryWork(row, flags.dimensions(), flags.micro_batches, flags.micro_batch_size, flags.device)
            say(f"starting {row.name}")
            rows[row.name] = stack.enter_context(start_row(row.name, MemoryRank, work, row.ranks))
            rows[row.name].ready(flags.timeout)
        yield rows


def _figures(flags: MemoryBenchmark, measured: dict[str, _Measured]) -> list[Figures]:
    theirs, never = measured[SPIKINGJELLY], measured[NEVER]
    usual = [median(times) for times in never.times]
    lines = []
    for name, row in measured.items():
        mine = [median(times) for times in row.times]
        model = {key: value for key, value in asdict(flags.dimensions()).items() if key != "variant"}
        shape = {key: getattr(flags, key) for key in ("micro_batch_size", "micro_batches", "device")}
        lines.append(
            {
                "row": name,
                "configuration": {"case": "memory", "row": name, "model": model, **shape},
                "counted_mb": MB * row.counted,
                "of_spikingjelly": row.counted / theirs.counted,
                "predicted_mb": None if row.predicted is None else MB * row.predicted,
                "step_ms": summary([1000 * each for each in mine]),
                "time_ratio": ratios(mine, usual),
            }
        )
    return lines


def report(flags: MemoryBenchmark, lines: Sequence[Line], earlier: Sequence[Line | None]) -> str:
    machine = lines[0]["machine"]
    return (
        f"{flags.model}, {flags.micro_batches} micro-batch(es) of {flags.micro_batch_size} samples, a thread a rank; "
        f"{machine['cpu']}\n\n{table(HEADINGS, list(map(_cells, lines, earlier)))}"
    )


def _cells(line: Line, last: Line | None) -> list[str]:
    counted, predicted, ratio = line["counted_mb"], line["predicted_mb"], line["time_ratio"]
    return [
        line["row"],
        f"{counted:.0f}",
        f"{line['of_spikingjelly']:.3f}",
        shown(predicted, ".0f"),
        shown(predicted and predicted / counted, ".3f"),
        f"{line['step_ms']['median']:.0f}",
        f"{ratio['median']:.2f}",
        quartiles(ratio, ".2f"),
        change(line, last, "counted_mb"),
    ]


MEMORY = Case(MemoryBenchmark, measure, report, NOTES)
