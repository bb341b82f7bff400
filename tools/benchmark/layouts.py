"""Training steps of MegaSNN's layouts beside SpikingJelly's own model and one rank, side by side in one run."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, fields
from statistics import median
from typing import Annotated, Any, ClassVar, Literal

from megasnn.commands.flags import ScheduleName, name_in
from megasnn.config import ParallelConfig, TrainingConfig
from megasnn.config.checks import at_least, refusal
from megasnn.config.validate import cut_problems, layout_problems
from megasnn.kernels import BACKENDS
from megasnn.models.build import building_problems, describe_model
from megasnn.models.spikformer.model import Spikformer
from megasnn.models.vgg_dvs.model import VggDvs
from megasnn.schedule.named import AUTO_SCHEDULE, SCHEDULES
from tools.benchmark.harness import Case, Column, Figures, ratios, rounds, say, summary
from tools.benchmark.ranks import RankProcesses, start_ranks
from tools.benchmark.steps import SPIKINGJELLY, Dimensions, Facts, StepRank, Turn, Work

ModelName = Literal["spikformer_ti", "spikformer_s", "spikformer_cifar10", "vgg_dvs"]
# Smaller images than those of the Spikformers for ImageNet: a step takes seconds on one core.
DIMENSIONS: dict[str, dict[str, Any]] = {
    "spikformer_ti": dict(embed_dim=256, num_heads=8, patch_size=16, image_size=64),
    "spikformer_s": dict(depth=6, patch_size=16, image_size=64),
    "spikformer_cifar10": {},
}
MEGASNN = "megasnn"
SIZES = {"dp": "", "tp": "tensor_model", "pp": "pipeline_model", "cp": "context", "wp": "weight"}
_NAME = re.compile(r"(?P<row>[^:@]+)(?::(?P<pieces>[1-9]\d*))?(?:@(?P<threads>all|[1-9]\d*))?")
_SCHEDULES = sorted((AUTO_SCHEDULE, *SCHEDULES), key=len, reverse=True)
_PART = re.compile(rf"-?(?:(?P<axis>{'|'.join(SIZES)})(?P<size>[1-9]\d*)|(?P<option>rows|zero1|always)|"
                   rf"(?P<schedule>{'|'.join(map(re.escape, _SCHEDULES))}))")  # fmt: skip


@dataclass(frozen=True, eq=False)
class Row:
    """A row by its name: a library, or sizes of axes and options, in so many micro-batches, with threads a rank."""

    name: str
    library: str = MEGASNN
    compiled: bool = False
    sizes: Mapping[str, int] = field(default_factory=dict)
    options: frozenset[str] = frozenset()
    schedule: str | None = None
    pieces: int | None = None
    threads: int = 1

    @property
    def ranks(self) -> int:
        found = 1
        for size in self.sizes.values():
            found *= size
        return found

    @property
    def replicas(self) -> int:
        return self.sizes.get("dp", 1) * self.sizes.get("wp", 1)

    def parallel(self, schedule: str) -> ParallelConfig:
        """As flags. Args: schedule: of rows that name none."""
        sizes: dict[str, Any] = {
            f"{SIZES[axis]}_parallel_size": size for axis, size in self.sizes.items() if axis != "dp"
        }
        return ParallelConfig(
            **sizes,
            context_parallel_cut=("rows" if "rows" in self.options else "samples") if "cp" in self.sizes else "auto",
            pipeline_schedule=self.schedule or schedule,
            recompute="always" if "always" in self.options else "never",
            use_distributed_optimizer="zero1" in self.options,
        )


def parse_row(name: str, all_threads: int) -> Row:
    """Raises ValueError for a name that is none. Args: all_threads: what "@all" stands for."""
    whole = _NAME.fullmatch(name)
    layout = whole["row"] if whole else ""
    pieces = int(whole["pieces"]) if whole and whole["pieces"] else None
    threads = all_threads if whole and whole["threads"] == "all" else int((whole and whole["threads"]) or 1)
    if layout in (SPIKINGJELLY, f"{SPIKINGJELLY}-compiled") and pieces is None:
        return Row(name, SPIKINGJELLY, layout != SPIKINGJELLY, threads=threads)
    parts, end = list[re.Match[str]](), len(MEGASNN) if layout.startswith(MEGASNN) else 0
    while match := _PART.match(layout, end):
        parts.append(match)
        end = match.end()
    sizes = {each["axis"]: int(each["size"]) for each in parts if each["axis"]}
    schedules = [each["schedule"] for each in parts if each["schedule"]]
    options = frozenset(each["option"] for each in parts if each["option"])
    row = Row(name, MEGASNN, False, sizes, options, schedules[0] if schedules else None, pieces, threads)
    twice = len(sizes) + len(schedules[:1]) + len(options) < len(parts)
    lacks = ("rows" in options and "cp" not in sizes) or (schedules and "pp" not in sizes)
    lacks = lacks or ("zero1" in options and row.replicas * sizes.get("cp", 1) == 1)
    if not layout or end < len(layout) or twice or lacks:
        raise ValueError(
            f"--rows: {name!r} is no row; rows are {SPIKINGJELLY} (also -compiled), {MEGASNN} (one rank), "
            "and sizes like dp2, tp2, pp2-zbv, cp2, cp2rows, wp2, dp2zero1, dp2tp2, megasnn-always, with "
            ":MICRO_BATCHES and then @THREADS or @all behind"
        )
    return row


@dataclass(frozen=True)
class Layouts(Case):
    """Training steps of layouts beside SpikingJelly's own model. A step has the whole batch, AdamW included."""

    columns: ClassVar[Sequence[Column]] = (
        ("row", "row", ""),
        ("ranks", "ranks", "d"),
        ("threads", "threads", "d"),
        ("step ms", "step_ms", ".1f"),
        ("samples/s", "samples_per_s", ".1f"),
        ("x one rank", f"x_{MEGASNN}", ".2f"),
        ("x SpikingJelly", f"x_{SPIKINGJELLY}", ".2f"),
        ("peak MB", "peak_mb", ".0f"),
        ("activations MB", "needed_mb", ".0f"),
        ("calls", "calls", "d"),
        ("MB moved", "moved_mb", ".2f"),
    )
    notes: ClassVar[str] = """\
step ms: median and quartiles of all steps, each on its slowest rank
x: throughput against the row megasnn (one rank, one thread) or spikingjelly, median of the rounds' ratios
peak MB: of the largest rank, above its memory before the model was built, with everything imported and compiled
activations MB: what a step takes at most above weights, gradients and optimizer state, counted as it is allocated
calls, MB moved: of the busiest rank in a step: received in collectives, sent in messages"""

    model: ModelName = "spikformer_cifar10"
    """Its dimensions are SpikingJelly's; images of 64 pixels, 32 of spikformer_cifar10, 48 of vgg_dvs."""
    dimensions: tuple[str, ...] = ()
    """Others, as image_size=224 depth=8."""
    rows: tuple[str, ...] = ()
    """spikingjelly, spikingjelly-compiled (torch.compile), megasnn (one rank), or layouts: dp2, tp2, pp2, cp2 (samples
    are shared), cp2rows, wp2 and products of them, behind which zero1, always (recompute), a schedule, :MICRO_BATCHES
    of a replica and then @THREADS or @all may follow."""
    global_batch_size: int = 32
    """Samples of a step."""
    micro_batches: int = 8
    """Of a replica in rows with a pipeline; the others take their samples in one go, unless a row says it."""
    precision: Literal["fp32", "tf32", "bf16"] = "fp32"
    """bf16: products in bfloat16; autocast for SpikingJelly."""
    sparse_products: Literal["auto", "off"] = "auto"
    """As training takes it, on a CPU."""
    neuron_backend: Annotated[str, name_in(BACKENDS)] = "auto"
    """Of MegaSNN's rows."""
    pipeline_schedule: ScheduleName = AUTO_SCHEDULE
    """Of rows with a pipeline that name none."""
    device: Literal["cpu", "cuda"] = "cpu"
    """cuda needs a GPU for each rank of a row."""
    steps: int = 2
    """Timed steps of a turn; an untimed one comes before."""
    timeout: float = 600.0
    """Seconds that a turn may take before the benchmark gives up."""

    anew: ClassVar[bool] = False

    def problems(self) -> list[str]:
        sizes = ("rounds", "steps", "global_batch_size", "micro_batches")
        wrong = at_least(self, 1, *sizes, "timeout")
        wrong += refusal(self.dimensions_of_model) + refusal(self.parsed)
        return wrong or [problem for row in self.parsed() for problem in self._row_problems(row)]

    def _row_problems(self, row: Row) -> list[str]:
        pieces = row.replicas * self.pieces(row)
        if self.global_batch_size % pieces:
            return [f"row {row.name}: --global-batch-size {self.global_batch_size} is no multiple of its {pieces} "
                    "micro-batches"]  # fmt: skip
        model, tensor = self.dimensions_of_model(), row.sizes.get("tp", 1)
        wrong = building_problems(model, model.neuron().spec, tensor)
        config = self.work(row).configuration()
        wrong = wrong or layout_problems(config, row.ranks)
        wrong = wrong or cut_problems(config.parallel, [each.layer_group for each in describe_model(model).layers])
        return [f"row {row.name}: {problem}" for problem in wrong]

    def parsed(self) -> list[Row]:
        """Raises ValueError for a name that is no row."""
        names = self.rows or self.default_rows()
        return [parse_row(name, os.cpu_count() or 1) for name in dict.fromkeys(names)]

    def default_rows(self) -> tuple[str, ...]:
        """Names of the rows that are measured where none are given."""
        both = SPIKINGJELLY, MEGASNN
        if self.device == "cuda":
            return both
        return *both, "dp2", "tp2", "pp2", "cp2", "cp2rows", f"{MEGASNN}@all", f"{SPIKINGJELLY}@all"

    def dimensions_of_model(self) -> Dimensions:
        """Raises ValueError for what is no dimension of the model."""
        vgg = self.model == "vgg_dvs"
        model: Dimensions = VggDvs() if vgg else Spikformer(**DIMENSIONS[self.model])
        values: dict[str, Any] = {each.name: getattr(model, each.name) for each in fields(model)}
        values |= {"num_classes": 10}
        for text in self.dimensions:
            name, _, value = text.partition("=")
            if name not in values:
                raise ValueError(f"--dimensions {text}: {self.model} has {', '.join(values)}")
            values[name] = type(values[name])(value)
        return type(model)(**values)

    def pieces(self, row: Row) -> int:
        """Micro-batches of a replica."""
        return row.pieces or (self.micro_batches if "pp" in row.sizes else 1)

    def work(self, row: Row) -> Work:
        size = self.global_batch_size // (row.replicas * self.pieces(row))
        training = TrainingConfig(
            micro_batch_size=size,
            global_batch_size=self.global_batch_size,
            precision=self.precision,
            sparse_products=self.sparse_products,
        )
        return Work(
            name=row.name,
            library=row.library,
            model=self.dimensions_of_model(),
            training=training,
            parallel=row.parallel(self.pipeline_schedule),
            neuron_backend=self.neuron_backend,
            ranks=row.ranks,
            threads=row.threads,
            device=self.device,
            compiled=row.compiled,
            anew=self.anew,
        )

    def measure(self) -> list[Figures]:
        return measured(self, {row: self.work(row) for row in self.parsed()})


class Schedules(Layouts):
    """Every pipeline schedule beside its simulation, and beside one rank with as many micro-batches and with one batch.

    Each turn makes an Engine, which measures the layers right before its steps: both are slowed alike.
    """

    columns = (
        *Layouts.columns[:1],
        ("that is", "schedule", ""),
        ("layers", "layers", ""),
        ("step ms", "step_ms", ".1f"),
        ("simulated", "simulated_ms", ".1f"),
        ("measured/simulated", "x_simulated", ".3f"),
        ("idle", "idle", ".1%"),
        ("x one batch", f"x_{MEGASNN}", ".2f"),
        ("x one rank", "x_same", ".2f"),
        *Layouts.columns[7:],
        ("packed", "packed", ".3f"),
    )
    notes = (
        Layouts.notes
        + """
simulated: from the first to the last action, by the layers' costs measured in the same turn; a step adds norm, clipping
   and AdamW. idle: simulated share of the ranks' time. packed: bytes moved, as a share of their size unpacked
x one batch, x one rank: throughput against one rank with all samples in one go, and with the same micro-batches"""
    )
    anew = True

    def default_rows(self) -> tuple[str, ...]:
        return MEGASNN, f"{MEGASNN}:{self.micro_batches}", *(f"pp2-{name}" for name in (*SCHEDULES, AUTO_SCHEDULE))


def measured(case: Layouts, works: Mapping[Row, Work]) -> list[Figures]:
    """Gives all rows their turns, and returns the figures of each."""
    turns: dict[Row, list[list[Turn]]] = {row: [] for row in works}
    with _started(case, works) as started:
        for number in rounds(case.rounds):
            for row, ranks in started.items():
                turns[row].append(ranks.call("turn", case.steps, 2 if number == 1 else 1, timeout=case.timeout))
                say(f"  {row.name} {1e3 * median(_seconds(turns[row][-1])):.0f} ms", end="")
            say("")
        facts = {row: ranks.call("facts", timeout=case.timeout) for row, ranks in started.items()}
    return figures(works, turns, facts)


@contextmanager
def _started(case: Layouts, works: Mapping[Row, Work]) -> Iterator[dict[Row, RankProcesses]]:
    say("starting the ranks of all rows ...")
    with ExitStack() as stack:
        started = {}
        for row, work in works.items():
            started[row] = stack.enter_context(start_ranks(row.name, StepRank, work, work.ranks, row.threads))
        for ranks in started.values():
            ranks.ready(case.timeout)
        yield started


def figures(
    works: Mapping[Row, Work], turns: Mapping[Row, Sequence[Sequence[Turn]]], facts: Mapping[Row, Sequence[Facts]]
) -> list[Figures]:
    """Args: turns: of each round, those of the ranks. facts: of each rank."""
    medians = {row: [median(_seconds(turn)) for turn in of_row] for row, of_row in turns.items()}
    by_name = {row.name: medians[row] for row in works}
    single = [row for row in works if row.library == MEGASNN and row.ranks == 1 and row.pieces]
    found = []
    for row, work in works.items():
        samples, ranks = work.training.global_batch_size, facts[row]
        steps = [1e3 * value for turn in turns[row] for value in _seconds(turn)]
        busiest = max(ranks, key=lambda each: each.moved_mb)
        own: Figures = {
            "row": row.name,
            "ranks": work.ranks,
            "threads": row.threads,
            "step_ms": summary(steps),
            "samples_per_s": 1e3 * samples / median(steps),
            "micro_batch_size": work.training.micro_batch_size,
            "peak_mb": max(each.peak_mb for each in ranks),
            "needed_mb": max((each.needed_mb for each in ranks if each.needed_mb is not None), default=None),
            "calls": busiest.calls,
            "moved_mb": busiest.moved_mb,
            "packed": busiest.packed,
            **{name: getattr(ranks[0], name) for name in ("layers", "schedule", "idle")},
        }
        for name in (MEGASNN, SPIKINGJELLY):
            own[f"x_{name}"] = ratios(by_name[name], medians[row]) if name in by_name else None
        own["x_same"] = ratios(medians[single[0]], medians[row]) if single else None
        simulated = [turn[0].simulated for turn in turns[row]]
        if all(each is not None for each in simulated):
            times = [each for each in simulated if each is not None]
            own |= {"simulated_ms": summary([1e3 * each for each in times]), "x_simulated": ratios(medians[row], times)}
        found.append(own)
    return found


def _seconds(turn: Sequence[Turn]) -> list[float]:
    """Seconds of each step, on the rank where it takes longest."""
    return [max(step) for step in zip(*(rank.seconds for rank in turn), strict=True)]
