"""Steps of real ranks on layouts, beside the planner's prediction of time and memory."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import ClassVar

from megasnn.common.grid import Grid
from megasnn.config.checks import flag
from megasnn.planner.candidates import Layout, Prefer
from megasnn.planner.costs_file import Analysis, read
from megasnn.planner.machines import Cluster
from megasnn.planner.plan import plan
from megasnn.planner.predict import Predicted, Predictor
from megasnn.schedule.named import SCHEDULES
from tools.benchmark.harness import Column, Figures, say
from tools.benchmark.layouts import Layouts, measured
from tools.benchmark.rows import MEGASNN, Row, parse_row
from tools.benchmark.steps import Work

RANKS = 2
ROOT = Path(__file__).resolve().parents[2]
PREFER: tuple[Prefer, ...] = "speed", "memory"


@dataclass(frozen=True)
class Plans(Layouts):
    """The planner's predictions for layouts on two ranks, from measured layers, beside measured steps."""

    columns: ClassVar[Sequence[Column]] = (
        ("row", "row", ""),
        ("plan for", "plan_of", ""),
        ("step ms", "step_ms", ".1f"),
        ("predicted", "foreseen_ms", ".1f"),
        ("x predicted", "x_foreseen", ".3f"),
        ("MB", "needed_mb", ".1f"),
        ("predicted", "foreseen_mb", ".1f"),
        ("x predicted", "mb_x_foreseen", ".3f"),
        ("now/then", "x_earlier", ".3f"),
    )
    details: ClassVar[Sequence[Column]] = ()
    notes: ClassVar[str] = """\
MB: largest rank's allocations in a step, above weights, gradients and optimizer state
plan for: the planner's choice among all layouts of one and two ranks"""

    global_batch_size: int = 16
    """Samples per step."""
    micro_batches: int = 4
    """Micro-batches per step, over all replicas."""

    def default_rows(self) -> tuple[str, ...]:
        pipelines = ("pp2-1f1b", "pp2-zb1p", "pp2-zbv", "pp2-1f1b-always")
        return MEGASNN, f"{MEGASNN}-always", "dp2", "dp2zero1", "wp2", "tp2", "cp2", "cp2rows", *pipelines

    def pieces(self, row: Row) -> int:
        return self.micro_batches // row.replicas

    def problems(self) -> list[str]:
        wrong = super().problems()
        if wrong:
            return wrong
        for row in self.parsed():
            if row.library != MEGASNN or row.pieces or row.ranks > RANKS or self.micro_batches % row.replicas:
                wrong.append(
                    f"row {row.name}: rows are {MEGASNN} and layouts of {RANKS} ranks, with {self.micro_batches} "
                    "micro-batches"
                )
        return wrong

    def measure(self) -> list[Figures]:
        with TemporaryDirectory() as folder:
            costs = Path(folder, "costs.json")
            analysis = self._analysed(costs)
            assert analysis.machine is not None
            config = self.work(parse_row(MEGASNN, 1)).configuration()
            cluster = Cluster(RANKS, RANKS, replace(analysis.machine, memory=1e15))
            predictor = Predictor(analysis, config, cluster)
            size = config.training.micro_batch_size
            layouts = {row: layout_of(row, size) for row in self.parsed()}
            chosen = {name: plan(analysis, config, cluster, name).layout for name in PREFER}
            for name, layout in chosen.items():
                if layout not in layouts.values():
                    say(f"plan for {name}: {layout}, not among the rows")
            predicted = {row: predictor.predict(layout) for row, layout in layouts.items()}
            works = {row: self._planned(row, layouts[row], predicted[row]) for row in layouts}
            found = measured(self, works)
        for figures, (row, prediction) in zip(found, predicted.items(), strict=True):
            megabytes = max(each.gathered + each.kept + each.working + each.messages for each in prediction.memory)
            milliseconds = 1e3 * prediction.time.total
            figures |= {
                "plan_of": ", ".join(name for name, layout in chosen.items() if layout == layouts[row]),
                "foreseen_ms": milliseconds,
                "x_foreseen": figures["step_ms"].median / milliseconds,
                "foreseen_mb": megabytes,
                "mb_x_foreseen": figures["needed_mb"] / megabytes,
            }
        return found

    def _analysed(self, costs: Path) -> Analysis:
        """Costs of the layers on one rank and on two, measured by the planner's program."""
        say("measuring the layers")
        work = self.work(parse_row(MEGASNN, 1))
        size = {"micro_batch_size": work.training.micro_batch_size, "global_batch_size": self.global_batch_size}
        values = {each.name: getattr(work.model, each.name) for each in fields(work.model)}
        words = []
        for name, value in (values | size).items():
            if not isinstance(value, bool | None):
                words.append(f"{flag(name)}={value}")
        words += [f"--sparse-products={self.sparse_products}", f"--device={self.device}"]
        launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={RANKS}"]
        program = [str(ROOT / "tools" / "plan.py"), work.model.name, f"--gpus={RANKS}", "--measure", f"--costs={costs}"]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        subprocess.run([*launch, *program, *words], check=True, env=environment, stdout=subprocess.DEVNULL)
        return read(costs)

    def _planned(self, row: Row, layout: Layout, predicted: Predicted) -> Work:
        work = self.work(row)
        return replace(work, parallel=layout.parallel(work.parallel, predicted.bounds))


def layout_of(row: Row, micro_batch_size: int) -> Layout:
    """The planner's layout of a row."""
    sizes = row.sizes
    schedule = row.schedule or "1f1b"
    chunks = SCHEDULES[schedule].chunks if "pp" in sizes else 1
    recompute = "always" if "always" in row.options else "never"
    return Layout(
        Grid(
            pp=sizes.get("pp", 1),
            dp_replicate=sizes.get("dp", 1),
            tp=sizes.get("tp", 1),
            dp_shard=sizes.get("wp", 1),
            cp=sizes.get("cp", 1),
        ),
        micro_batch_size,
        cut=row.cut,
        schedule=schedule,
        chunks=chunks,
        recompute=recompute,
        shards_optimizer="zero1" in row.options,
    )
