"""Rows of the benchmark by their names, such as dp2, pp2-zbv:8 or megasnn@all."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Any, Literal

from megasnn.common.grid import ContextCut
from megasnn.config import ParallelConfig
from megasnn.schedule.named import AUTO_SCHEDULE, SCHEDULES
from tools.benchmark.steps import PLAIN, SPIKINGJELLY

MEGASNN = "megasnn"
SIZES = {"dp": "", "tp": "tensor_model", "pp": "pipeline_model", "cp": "context", "wp": "weight"}
_NAME = re.compile(r"(?P<row>[^:@]+)(?::(?P<pieces>[1-9]\d*))?(?:@(?P<threads>all|[1-9]\d*))?")
_SCHEDULES = sorted((AUTO_SCHEDULE, *SCHEDULES), key=len, reverse=True)
_PART = re.compile(rf"-?(?:(?P<axis>{'|'.join(SIZES)})(?P<size>[1-9]\d*)|(?P<option>rows|tokens|zero1|always)|"
                   rf"(?P<schedule>{'|'.join(map(re.escape, _SCHEDULES))}))")  # fmt: skip


@dataclass(frozen=True, eq=False)
class Row:
    """A row of the table: a library, or axis sizes and options. `pieces` are micro-batches per replica."""

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
        return prod(self.sizes.values())

    @property
    def replicas(self) -> int:
        return self.sizes.get("dp", 1) * self.sizes.get("wp", 1)

    @property
    def cut(self) -> ContextCut:
        """How context-parallel ranks share a micro-batch."""
        if "tokens" in self.options:
            return "tokens"
        return "rows" if "rows" in self.options else "samples"

    def parallel(self, schedule: str) -> ParallelConfig:
        """The row's flags, with `schedule` unless the row names one."""
        sizes: dict[str, Any] = {
            f"{SIZES[axis]}_parallel_size": size for axis, size in self.sizes.items() if axis != "dp"
        }
        cut: Literal["auto", "samples", "rows", "tokens"] = "auto"
        if "cp" in self.sizes:
            cut = self.cut
        recompute = "always" if "always" in self.options else "never"
        return ParallelConfig(
            **sizes,
            context_parallel_cut=cut,
            pipeline_schedule=self.schedule or schedule,
            recompute=recompute,
            use_distributed_optimizer="zero1" in self.options,
        )


def parse_row(name: str, all_threads: int) -> Row:
    """The row of a name; "@all" are `all_threads`. Raises ValueError for an invalid name."""
    match = _NAME.fullmatch(name)
    if match is None:
        raise ValueError(_invalid_row(name))
    pieces = int(match["pieces"]) if match["pieces"] else None
    threads = all_threads if match["threads"] == "all" else int(match["threads"] or 1)
    layout = match["row"]
    library, compiled, _ = layout.partition("-compiled")
    if library in (SPIKINGJELLY, PLAIN) and layout == library + compiled and pieces is None:
        return Row(name, library, bool(compiled), threads=threads)
    sizes: dict[str, int] = {}
    options: set[str] = set()
    schedule: str | None = None
    end = len(MEGASNN) if layout.startswith(MEGASNN) else 0
    while end < len(layout):
        part = _PART.match(layout, end)
        if part is None:
            raise ValueError(_invalid_row(name))
        end = part.end()
        is_repeated = part["axis"] in sizes or part["option"] in options or (schedule and part["schedule"])
        if is_repeated:
            raise ValueError(_invalid_row(name))
        if part["axis"]:
            sizes[part["axis"]] = int(part["size"])
        elif part["option"]:
            options.add(part["option"])
        else:
            schedule = part["schedule"]
    row = Row(name, MEGASNN, False, sizes, frozenset(options), schedule, pieces, threads)
    cuts = options & {"rows", "tokens"}
    lacks_context = bool(cuts) and ("cp" not in sizes or len(cuts) > 1)
    lacks_pipeline = schedule is not None and "pp" not in sizes
    lacks_replicas = "zero1" in options and row.replicas * sizes.get("cp", 1) == 1
    if lacks_context or lacks_pipeline or lacks_replicas:
        raise ValueError(_invalid_row(name))
    return row


def _invalid_row(name: str) -> str:
    return (
        f"--rows {name!r}: rows are {SPIKINGJELLY}, or {PLAIN} for a language model (also -compiled), {MEGASNN} (one "
        "rank), and sizes like dp2, tp2, pp2-zbv, cp2, cp2rows, cp2tokens, wp2, dp2zero1, dp2tp2, megasnn-always, "
        "followed by :MICRO_BATCHES and then @THREADS or @all"
    )
