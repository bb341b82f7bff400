"""Training steps of MegaSNN's layouts beside SpikingJelly's own model and one rank, in one run."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, fields
from statistics import median
from typing import Annotated, Any, ClassVar, Literal

from megasnn.commands.flags import ScheduleName, name_in
from megasnn.common.files import quantity
from megasnn.common.grid import Grid
from megasnn.config import TrainingConfig
from megasnn.config.checks import at_least, refusal
from megasnn.config.validate import cut_problems, layout_problems
from megasnn.kernels import BACKENDS
from megasnn.models.build import building_problems, describe_model
from megasnn.models.spike_lm.model import SpikeLM
from megasnn.models.spikformer.model import Spikformer
from megasnn.models.vgg_dvs.model import VggDvs
from megasnn.schedule.named import AUTO_SCHEDULE, SCHEDULES
from tools.benchmark.harness import Case, Column, Figures, Summary, ratios, rounds, say, summary
from tools.benchmark.ranks import RankProcesses, start_ranks
from tools.benchmark.rows import MEGASNN, Row, parse_row
from tools.benchmark.steps import PLAIN, SPIKINGJELLY, Dimensions, Facts, StepRank, Turn, Work

ModelName = Literal["spikformer_ti", "spikformer_s", "spikformer_cifar10", "vgg_dvs", "spike_lm"]
# Smaller images than ImageNet's: a step takes seconds on one core.
DIMENSIONS: dict[str, dict[str, Any]] = {
    "spikformer_ti": dict(embed_dim=256, num_heads=8, patch_size=16, image_size=64),
    "spikformer_s": dict(depth=6, patch_size=16, image_size=64),
    "spikformer_cifar10": {},
}
PARTS = ("forward", "backward", "recompute", "transfers", "forward_backward", "optimizer")
"""Parts of a step with a time of their own, where a row has them."""


@dataclass(frozen=True)
class Layouts(Case):
    """Training steps of layouts beside SpikingJelly's own model, with the whole batch and AdamW."""

    columns: ClassVar[Sequence[Column]] = (
        ("row", "row", ""),
        ("ranks", "ranks", "d"),
        ("threads", "threads", "d"),
        ("step ms", "step_ms", ".1f"),
        ("samples/s", "samples_per_s", ".1f"),
        ("x one rank", f"x_{MEGASNN}", ".2f"),
        ("x SpikingJelly", f"x_{SPIKINGJELLY}", ".2f"),
        ("x plain", f"x_{PLAIN}", ".2f"),
        ("peak MB", "peak_mb", ".0f"),
        ("activations MB", "needed_mb", ".0f"),
        ("now/then", "x_earlier", ".3f"),
    )
    details: ClassVar[Sequence[Column]] = (
        ("row", "row", ""),
        ("schedule", "schedule", ""),
        ("forward ms", "forward_ms", ".1f"),
        ("backward ms", "backward_ms", ".1f"),
        ("recompute ms", "recompute_ms", ".1f"),
        ("transfers ms", "transfers_ms", ".1f"),
        ("optimizer ms", "optimizer_ms", ".1f"),
        ("calls", "calls", "d"),
        ("MB moved", "moved_mb", ".2f"),
        ("TP calls", "tp_calls", "d"),
        ("TP MB", "tp_mb", ".2f"),
    )
    compared: ClassVar[str | None] = "step_ms"
    regime: ClassVar[str] = "strong"
    notes: ClassVar[str] = """\
step ms: median and quartiles of all steps, each on its slowest rank
x: throughput relative to the row megasnn (one rank, one thread), spikingjelly or plain, median of the rounds' ratios
peak MB: largest rank, above its memory before the model was built
activations MB: peak allocations of a step, above weights, gradients and optimizer state
now/then: median step relative to the latest earlier one in the log of the same configuration, processor and torch
forward, backward, recompute, transfers: sums over a step's actions of a kind, each on its slowest rank. Exchanges
   inside layers belong to forward and backward, waits for other stages to transfers
calls, MB moved: busiest rank in a step: received in collectives, sent in messages. TP: between tensor-parallel ranks"""

    model: ModelName = "spikformer_cifar10"
    """Model with SpikingJelly's dimensions; images of 64 pixels, 32 for spikformer_cifar10, 48 for vgg_dvs; 512 tokens
    for spike_lm."""
    dimensions: tuple[str, ...] = ()
    """Other dimensions, such as image_size=224 depth=8."""
    rows: tuple[str, ...] = ()
    """spikingjelly, spikingjelly-compiled (torch.compile), for spike_lm plain (PyTorch) and plain-compiled in their
    place, megasnn (one rank), or layouts: dp2, tp2, pp2, cp2 (shared samples), cp2rows, cp2tokens, wp2 and products of
    them. zero1, always (recompute), a schedule, :MICRO_BATCHES per replica and then @THREADS or @all may follow."""
    global_batch_size: int = 32
    """Samples per step."""
    micro_batches: int = 8
    """Micro-batches per replica in rows with a pipeline; other rows use one, unless they name a number."""
    precision: Literal["fp32", "tf32", "bf16"] = "fp32"
    """bf16: products in bfloat16; autocast for SpikingJelly."""
    sparse_products: Literal["auto", "off"] = "auto"
    """Sparse products on a CPU, as in training."""
    neuron_backend: Annotated[str, name_in(BACKENDS)] = "auto"
    """Neuron kernels of MegaSNN's rows."""
    pipeline_schedule: ScheduleName = AUTO_SCHEDULE
    """Schedule of pipeline rows that name none."""
    device: Literal["cpu", "cuda"] = "cpu"
    """cuda needs a GPU for each rank of a row."""
    steps: int = 2
    """Timed steps per turn, after an untimed one."""
    timeout: float = 600.0
    """Limit of a turn in seconds."""

    anew: ClassVar[bool] = False

    def problems(self) -> list[str]:
        sizes = ("rounds", "steps", "global_batch_size", "micro_batches")
        wrong = at_least(self, 1, *sizes, "timeout")
        wrong += refusal(self.dimensions_of_model) + refusal(self.parsed)
        if wrong:
            return wrong
        for row in self.parsed():
            wrong += self._row_problems(row)
        return wrong

    def _row_problems(self, row: Row) -> list[str]:
        pieces = row.replicas * self.pieces(row)
        if self.samples(row) % pieces:
            batch = f"--global-batch-size {self.global_batch_size}"
            if self.samples(row) != self.global_batch_size:
                batch = f"a global batch of {self.samples(row)} ({batch} for each rank)"
            return [f"row {row.name}: {batch} does not divide into {quantity(pieces, 'micro-batch')}"]
        model = self.dimensions_of_model()
        if row.library != MEGASNN and (row.library == PLAIN) != isinstance(model, SpikeLM):
            return [f"row {row.name}: spike_lm has {PLAIN}, and other models have {SPIKINGJELLY}"]
        grid = Grid(tp=row.sizes.get("tp", 1), cp=row.sizes.get("cp", 1))
        wrong = building_problems(model, model.neuron().spec, grid, row.cut)
        config = self.work(row).configuration()
        wrong = wrong or layout_problems(config, row.ranks)
        wrong = wrong or cut_problems(config.parallel, [each.layer_group for each in describe_model(model).layers])
        return [f"row {row.name}: {problem}" for problem in wrong]

    def parsed(self) -> list[Row]:
        """Raises ValueError for an invalid name."""
        names = self.rows or self.default_rows()
        return [parse_row(name, os.cpu_count() or 1) for name in dict.fromkeys(names)]

    def default_rows(self) -> tuple[str, ...]:
        """Names of the rows without --rows."""
        reference = PLAIN if self.model == "spike_lm" else SPIKINGJELLY
        if self.device == "cuda":
            return reference, MEGASNN
        if self.model == "spike_lm":
            return PLAIN, f"{PLAIN}-compiled", MEGASNN, "dp2", "tp2", "pp2", "cp2tokens"
        return SPIKINGJELLY, MEGASNN, "dp2", "tp2", "pp2", "cp2", "cp2rows", f"{MEGASNN}@all", f"{SPIKINGJELLY}@all"

    def dimensions_of_model(self) -> Dimensions:
        """The model with `--dimensions`. Raises ValueError for an unknown name."""
        model: Dimensions
        if self.model == "spike_lm":
            model = SpikeLM(seq_length=512)
        else:
            model = VggDvs() if self.model == "vgg_dvs" else Spikformer(**DIMENSIONS[self.model])
        values: dict[str, Any] = {each.name: getattr(model, each.name) for each in fields(model)}
        values["num_classes"] = 10
        for text in self.dimensions:
            name, _, value = text.partition("=")
            if name not in values:
                raise ValueError(f"--dimensions {text}: the dimensions of {self.model} are {', '.join(values)}")
            values[name] = type(values[name])(value)
        return type(model)(**values)

    def pieces(self, row: Row) -> int:
        """Micro-batches per replica."""
        if row.pieces:
            return row.pieces
        return self.micro_batches if "pp" in row.sizes else 1

    def samples(self, row: Row) -> int:
        """Samples per step of a row."""
        return self.global_batch_size

    def configuration(self, work: Work) -> Figures:
        """Values that a row and an earlier one must share to be compared, besides its name and machine."""
        return {
            "regime": self.regime,
            "model": self.model,
            "dimensions": asdict(work.model),
            "global_batch_size": work.training.global_batch_size,
            "micro_batch_size": work.training.micro_batch_size,
            "threads": work.threads,
            "device": self.device,
            "precision": self.precision,
            "sparse_products": self.sparse_products,
            "neuron_backend": self.neuron_backend,
            "pipeline_schedule": work.parallel.pipeline_schedule,
        }

    def work(self, row: Row) -> Work:
        size = self.samples(row) // (row.replicas * self.pieces(row))
        training = TrainingConfig(
            micro_batch_size=size,
            global_batch_size=self.samples(row),
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
    """Every pipeline schedule beside its simulation, and beside one rank with the same micro-batches and with one.

    Each turn makes an Engine, which measures the layers right before its steps.
    """

    columns = (
        *Layouts.columns[:1],
        ("schedule", "schedule", ""),
        ("layers", "layers", ""),
        ("step ms", "step_ms", ".1f"),
        ("simulated", "simulated_ms", ".1f"),
        ("measured/simulated", "x_simulated", ".3f"),
        ("idle", "idle", ".1%"),
        ("x one batch", f"x_{MEGASNN}", ".2f"),
        ("x one rank", "x_same", ".2f"),
        *Layouts.columns[8:],
        ("packed", "packed", ".3f"),
    )
    notes = (
        Layouts.notes
        + """
simulated: from the first to the last action, with layer costs measured in the same turn; a step adds norm, clipping and
   AdamW. idle: simulated share of the ranks' time. packed: moved bytes relative to their size without packing
x one batch, x one rank: throughput relative to one rank with one micro-batch, and with the same micro-batches"""
    )
    anew = True

    def default_rows(self) -> tuple[str, ...]:
        return MEGASNN, f"{MEGASNN}:{self.micro_batches}", *(f"pp2-{name}" for name in (*SCHEDULES, AUTO_SCHEDULE))


def measured(case: Layouts, works: Mapping[Row, Work]) -> list[Figures]:
    """Runs the rounds of all rows, and returns their figures."""
    turns: dict[Row, list[list[Turn]]] = {row: [] for row in works}
    with _started(case, works) as started:
        for number in rounds(case.rounds):
            warmup = 2 if number == 1 else 1
            for row, ranks in started.items():
                turns[row].append(ranks.call("turn", case.steps, warmup, timeout=case.timeout))
                say(f"  {row.name} {1e3 * median(_seconds(turns[row][-1])):.0f} ms", end="")
            say("")
        facts = {row: ranks.call("facts", timeout=case.timeout) for row, ranks in started.items()}
    rows = figures(works, turns, facts)
    for found, work in zip(rows, works.values(), strict=True):
        found["regime"] = case.regime
        found["configuration"] = case.configuration(work)
    return rows


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
    """The figures of each row, from the turns by round and rank, and the facts by rank."""
    medians = {row: [median(_seconds(turn)) for turn in of_row] for row, of_row in turns.items()}
    by_name = {row.name: medians[row] for row in works}
    single = [row for row in works if row.library == MEGASNN and row.ranks == 1 and row.pieces]
    rows = []
    for row, work in works.items():
        found = _own_figures(row, work, turns[row], facts[row])
        for name in (MEGASNN, SPIKINGJELLY, PLAIN):
            found[f"x_{name}"] = ratios(by_name[name], medians[row]) if name in by_name else None
        found["x_same"] = ratios(medians[single[0]], medians[row]) if single else None
        simulated = [turn[0].simulated for turn in turns[row]]
        times = [each for each in simulated if each is not None]
        if len(times) == len(simulated):
            found["simulated_ms"] = summary([1e3 * each for each in times])
            found["x_simulated"] = ratios(medians[row], times)
        rows.append(found)
    return rows


def _own_figures(row: Row, work: Work, turns: Sequence[Sequence[Turn]], ranks: Sequence[Facts]) -> Figures:
    """The figures of a row by itself."""
    steps: list[float] = []
    for turn in turns:
        steps += [1e3 * value for value in _seconds(turn)]
    busiest = max(ranks, key=lambda each: each.moved_mb)
    busiest_tp = max(ranks, key=lambda each: each.tp_mb)
    samples = work.training.global_batch_size
    throughput = 1e3 * samples / median(steps)
    return {
        "row": row.name,
        "ranks": work.ranks,
        "threads": row.threads,
        "replicas": row.replicas,
        "gpu": ranks[0].gpu,
        "global_batch_size": samples,
        "rank_batch_size": samples / work.ranks,
        "step_ms": summary(steps),
        **{f"{part}_ms": _part_ms(turns, part) for part in PARTS},
        "samples_per_s": throughput,
        "samples_per_s_rank": throughput / work.ranks,
        "micro_batch_size": work.training.micro_batch_size,
        "peak_mb": max(each.peak_mb for each in ranks),
        "needed_mb": max((each.needed_mb for each in ranks if each.needed_mb is not None), default=None),
        "calls": busiest.calls,
        "moved_mb": busiest.moved_mb,
        "tp_calls": busiest_tp.tp_calls,
        "tp_mb": busiest_tp.tp_mb,
        "packed": busiest.packed,
        "layers": ranks[0].layers,
        "schedule": ranks[0].schedule,
        "idle": ranks[0].idle,
    }


def _part_ms(turns: Sequence[Sequence[Turn]], part: str) -> Summary | None:
    """A part of each step on its slowest rank; None where no rank has it."""
    slowest = []
    for turn in turns:
        for step in zip(*(rank.parts_ms for rank in turn), strict=True):
            of_ranks = [parts[part] for parts in step if part in parts]
            if of_ranks:
                slowest.append(max(of_ranks))
    return summary(slowest) if slowest else None


def _seconds(turn: Sequence[Turn]) -> list[float]:
    """Seconds of each step on its slowest rank."""
    by_rank = [rank.seconds for rank in turn]
    return [max(step) for step in zip(*by_rank, strict=True)]
