"""Other regimes than strong scaling: weak scaling, and the largest micro-batch within a memory limit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch

from megasnn.config.checks import at_least
from megasnn.config.training import Length
from megasnn.config.validate import micro_batch_candidates, with_micro_batch
from megasnn.engine import Engine
from megasnn.training.micro_batch import largest_predicted, largest_tried, try_step
from tools.benchmark.harness import Column, Figures, say
from tools.benchmark.layouts import Layouts, measured
from tools.benchmark.ranks import start_ranks
from tools.benchmark.rows import MEGASNN, Row
from tools.benchmark.steps import ENDLESS, SPIKINGJELLY, StepRank, Work


@dataclass(frozen=True)
class Weak(Layouts):
    """Weak scaling: each rank has the same number of samples, so the global batch grows with the ranks."""

    columns: ClassVar[Sequence[Column]] = (
        *Layouts.columns[:3],
        ("batch", "global_batch_size", "d"),
        ("step ms", "step_ms", ".1f"),
        ("samples/s", "samples_per_s", ".1f"),
        ("of a rank", "samples_per_s_rank", ".1f"),
        ("x one rank", f"x_{MEGASNN}", ".2f"),
        ("x SpikingJelly", f"x_{SPIKINGJELLY}", ".2f"),
        *Layouts.columns[7:],
    )
    notes: ClassVar[str] = f"{Layouts.notes}\nwith --weak x is the throughput of a rank, relative to the same"
    regime: ClassVar[str] = "weak"

    global_batch_size: int = 8
    """Samples per step of one rank; the global batch of a row has as many for each of its ranks."""

    def samples(self, row: Row) -> int:
        return self.global_batch_size * row.ranks


@dataclass(frozen=True)
class Capacity(Layouts):
    """The largest micro-batch of each layout within a memory limit, and its training steps."""

    columns: ClassVar[Sequence[Column]] = (
        *Layouts.columns[:2],
        ("micro-batch", "micro_batch_size", "d"),
        ("of at most", "largest_candidate", "d"),
        ("predicted MB", "predicted_mb", ".0f"),
        *Layouts.columns[3:5],
        *Layouts.columns[8:10],
        ("now/then", "x_earlier", ".3f"),
    )
    notes: ClassVar[str] = """\
micro-batch: the largest that fits, as --micro-batch-size auto finds it: by trying on one GPU, otherwise by forecast
of at most: the largest that the global batch and the row's number of micro-batches allow
predicted MB: forecast for the whole process on the rank that needs most; none where steps were tried
peak MB: largest rank, above its memory before the model was built
now/then: micro-batch relative to the latest earlier one in the log of the same configuration, processor and torch"""
    details: ClassVar[Sequence[Column]] = ()
    compared: ClassVar[str | None] = "micro_batch_size"
    regime: ClassVar[str] = "capacity"

    memory_mb: float = 1500.0
    """Limit for each rank's process, with the program itself; on a GPU for PyTorch's memory."""
    micro_batches: int = 8
    """Least number of micro-batches per replica in rows with a pipeline; one in other rows, unless they name it."""

    def default_rows(self) -> tuple[str, ...]:
        return MEGASNN, f"{MEGASNN}-always", "dp2", "tp2", "pp2", "cp2", "wp2"

    def problems(self) -> list[str]:
        wrong = super().problems() + at_least(self, 1, "memory_mb")
        if not wrong:
            theirs = [row.name for row in self.parsed() if row.library != MEGASNN]
            wrong = [f"row {name}: --capacity finds micro-batches of {MEGASNN} only" for name in theirs]
        return wrong

    def configuration(self, work: Work) -> Figures:
        # The micro-batch is the result here.
        shared = super().configuration(work) | {"memory_mb": self.memory_mb, "micro_batches": self.micro_batches}
        del shared["micro_batch_size"]
        return shared

    def measure(self) -> list[Figures]:
        works: dict[Row, Work] = {}
        capacities: list[Figures] = []
        for row in self.parsed():
            largest = self.work(row)
            with start_ranks(row.name, CapacityRank, largest, largest.ranks, largest.threads) as ranks:
                ranks.ready(self.timeout)
                size, needed = ranks.call("largest", self.memory_mb, timeout=self.timeout)[0]
            say(f"  {row.name}: micro-batches of {size}")
            works[row] = replace(largest, training=replace(largest.training, micro_batch_size=size))
            capacities.append({"largest_candidate": largest.training.micro_batch_size, "predicted_mb": needed})
        rows = measured(self, works)
        return [row | capacity for row, capacity in zip(rows, capacities, strict=True)]


class CapacityRank(StepRank):
    """A rank that finds the largest micro-batch of its work within a memory limit."""

    def largest(self, limit: float) -> tuple[int, float | None]:
        """Micro-batch size, and megabytes predicted for it. Collective. Raises ValueError if none fits.

        Args:
            limit: megabytes of a rank.
        """
        self.join()
        work = self.work
        config = work.configuration()
        most = work.training.micro_batch_size
        sizes = [size for size in micro_batch_candidates(config, work.ranks) if size <= most]
        if work.device == "cuda" and work.ranks == 1:
            total = torch.cuda.get_device_properties(self.device).total_memory
            torch.cuda.set_per_process_memory_fraction(min(1.0, 1e6 * limit / total), self.device)
            return largest_tried(config, sizes, try_step)[0], None
        with Engine(with_micro_batch(config, sizes[0]), length=Length(ENDLESS)) as engine:
            return largest_predicted(config, engine, sizes, limit)
