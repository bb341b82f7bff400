"""A whole run: starts the ranks of all rows, gives the rows their turns, and collects the figures."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from statistics import median
from typing import Any

from megasnn.benchmark.config import BenchmarkConfig
from megasnn.benchmark.log import append_lines, latest_alike, read_lines, surroundings
from megasnn.benchmark.processes import RankProcesses
from megasnn.benchmark.results import Measurements, figures, step_times
from megasnn.benchmark.rows import Row
from megasnn.benchmark.table import NOTES, brief, table
from megasnn.benchmark.task import RankTask, make_worker
from megasnn.models.vgg_dvs.dimensions import VggDvsConfig

THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")


def run(config: BenchmarkConfig) -> list[dict[str, Any]]:
    """Measures, prints the table, appends to the log. Returns the lines that were appended.

    Raises:
        ConfigError: the rows, sizes and the model do not go together.
        RowError: a rank of a row failed.
        ValueError: the log holds a line that is not JSON.
    """
    config.check()
    earlier = read_lines(config.output)
    with _rows_started(config) as rows:
        measured, gpu = _measure(config, rows)
    around = surroundings(gpu)
    lines = [{**around, **line} for line in figures(config, measured)]
    append_lines(config.output, lines)
    machine = around["machine"]
    print(
        f"\n{_headline(config)}\n{machine['cpu']}, {machine['cores']} cores{f', {gpu}' if gpu else ''}, "
        f"torch {around['versions']['torch']}, spikingjelly {around['versions']['spikingjelly']}\n"
    )
    print(table(lines, [latest_alike(line, earlier) for line in lines]))
    print(f"{NOTES}\n\n{brief(lines)}\n\nappended to {config.output}")
    return lines


def _headline(config: BenchmarkConfig) -> str:
    model = config.dimensions()
    if isinstance(model, VggDvsConfig):
        text = f"VGG {model.channels}, event frames {model.image_size} x {model.image_size}"
    else:
        text = (
            f"Spikformer {model.embed_dim} wide, {model.depth} blocks, {model.num_heads} heads, "
            f"images {model.image_size} x {model.image_size} in patches of {model.patch_size}"
        )
    return (
        f"{text}, T {model.time_steps}; "
        f"global batch {config.global_batch_size} ({config.regime} scaling), {config.precision}; "
        f"{config.rounds} rounds of {config.steps} steps"
    )


@contextmanager
def _rows_started(config: BenchmarkConfig) -> Iterator[dict[Row, RankProcesses]]:
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="megasnn-benchmark-")))
        _say("starting the ranks of all rows ...")
        rows = {}
        for number, row in enumerate(config.table_rows()):
            ranks = _start(config, row, str(folder / f"store{number}"))
            rows[row] = stack.enter_context(closing(ranks))
        for ranks in rows.values():
            ranks.ready(config.timeout)
        yield rows


def _start(config: BenchmarkConfig, row: Row, store: str) -> RankProcesses:
    environment = {name: str(row.threads) for name in THREAD_VARIABLES}
    tasks = [RankTask(config, row, rank, store) for rank in range(row.ranks)]
    return RankProcesses(row.name, make_worker, tasks, environment)


def _measure(config: BenchmarkConfig, rows: Mapping[Row, RankProcesses]) -> tuple[dict[Row, Measurements], str | None]:
    limit = config.timeout
    measured = {}
    for row, ranks in rows.items():
        _say(f"building and warming up {row.name}")
        measured[row] = Measurements(ranks.call("prepare", timeout=limit))
    for turn in range(config.rounds):
        _say(f"round {turn + 1}/{config.rounds}, ms:", end="")
        for row, ranks in rows.items():
            _say(f"  {row.name}", end="")
            measured[row].turns.append(ranks.call("measure", config.steps, timeout=limit))
            _say(f" {1e3 * median(step_times(measured[row].turns[-1])):.0f}", end="")
        _say("")
    for row, ranks in rows.items():
        measured[row].memory = ranks.call("memory", timeout=limit)
    gpu = next(iter(rows.values())).call("gpu", timeout=limit)[0]
    return measured, gpu


def _say(text: str, end: str = "\n") -> None:
    print(text, end=end, file=sys.stderr, flush=True)
