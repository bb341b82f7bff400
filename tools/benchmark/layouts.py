"""A training step of MegaSNN's layouts and of SpikingJelly's own model, side by side."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from statistics import median

from megasnn.models.vgg_dvs.dimensions import VggDvs
from tools.benchmark.harness import Case, Part, rounds, say
from tools.benchmark.layouts_figures import Measurements, figures, step_times
from tools.benchmark.layouts_flags import LayoutBenchmark
from tools.benchmark.layouts_rank import LayoutRank
from tools.benchmark.layouts_rows import COMPILED, MEGASNN, SPIKINGJELLY, Row
from tools.benchmark.log import Line
from tools.benchmark.ranks import RankProcesses, start_row
from tools.benchmark.table import change, quartiles, shown, table

HEADINGS = (
    "row",
    "ranks x\nthreads",
    "step\nms",
    "quartiles",
    "samples\nper s",
    "x one\nrank",
    "x Spiking\nJelly",
    "peak\nMB",
    "x one\nrank",
    "activa-\ntions MB",
    "x one\nrank",
    "calls",
    "MB\nmoved",
    "fwd+bwd\nms",
    "optimizer\nms",
    "step,\nchange",
    "peak,\nchange",
)
NOTES = """\
x: throughput against the row megasnn (one rank, one thread) or spikingjelly, median of the rounds, each compared with
   itself; behind peak MB, memory against the row megasnn
peak MB: of the largest rank, above its memory before the model was built, everything imported and warmed up
activations: what forward and backward of the largest rank take at their peak above weights, gradients and optimizer
   state, counted where it is taken; behind it, against the row megasnn
calls, MB moved: of the busiest rank in one step; what it receives in collectives, and sends in messages
change: against the latest line in the log of the same row and configuration on the same kind of machine"""
TITLES = {
    MEGASNN: "one rank",
    SPIKINGJELLY: "SpikingJelly in one process",
    COMPILED: "SpikingJelly in one process under torch.compile",
}


def measure(flags: LayoutBenchmark) -> Iterator[Part]:
    """Starts the ranks of all rows, gives the rows their turns, and collects the figures."""
    limit = flags.timeout
    with _rows_started(flags) as rows:
        measured = {}
        for row, ranks in rows.items():
            say(f"building and warming up {row.name}")
            measured[row] = Measurements(ranks.call("prepare", timeout=limit))
        for _ in rounds(flags.rounds):
            for row, ranks in rows.items():
                turn = ranks.call("measure", flags.steps, timeout=limit)
                measured[row].turns.append(turn)
                say(f"  {row.name} {1e3 * median(step_times(turn)):.0f} ms", end="")
            say("")
        for row, ranks in rows.items():
            measured[row].events = ranks.call("events", timeout=limit)
            measured[row].memory = ranks.call("memory", timeout=limit)
        gpu = next(iter(rows.values())).call("gpu", timeout=limit)[0]
    yield Part(figures(flags, measured), gpu)


@contextmanager
def _rows_started(flags: LayoutBenchmark) -> Iterator[dict[Row, RankProcesses]]:
    with ExitStack() as stack:
        say("starting the ranks of all rows ...")
        rows = {}
        for row in flags.table_rows():
            started = start_row(row.name, LayoutRank, (flags, row), row.ranks, row.threads, row.variables)
            rows[row] = stack.enter_context(started)
        for ranks in rows.values():
            ranks.ready(flags.timeout)
        yield rows


def report(flags: LayoutBenchmark, lines: Sequence[Line], earlier: Sequence[Line | None]) -> str:
    machine, versions = lines[0]["machine"], lines[0]["versions"]
    gpu = f", {machine['gpu']}" if machine["gpu"] else ""
    return (
        f"{_headline(flags)}\n{machine['cpu']}, {machine['cores']} cores{gpu}, "
        f"torch {versions['torch']}, spikingjelly {versions['spikingjelly']}\n\n"
        f"{table_of(lines, earlier)}\n\n{brief(lines)}"
    )


def _headline(flags: LayoutBenchmark) -> str:
    model = flags.dimensions()
    if isinstance(model, VggDvs):
        text = f"VGG {model.channels}, event frames {model.image_size} x {model.image_size}"
    else:
        text = (
            f"Spikformer {model.embed_dim} wide, {model.depth} blocks, {model.num_heads} heads, "
            f"images {model.image_size} x {model.image_size} in patches of {model.patch_size}"
        )
    return (
        f"{text}, T {model.time_steps}; "
        f"global batch {flags.global_batch_size} ({flags.regime} scaling), {flags.precision}; "
        f"{flags.rounds} rounds of {flags.steps} steps"
    )


def table_of(lines: Sequence[Line], earlier: Sequence[Line | None]) -> str:
    """`earlier`: for each line the one that it is compared with."""
    return table(HEADINGS, list(map(_cells, lines, earlier)))


def _cells(line: Line, last: Line | None) -> list[str]:
    step, phases = line["step_ms"], line["phases_ms"]
    calls, moved = max(map(_total_traffic, line["traffic"]), key=lambda pair: pair[1])
    memory_ratio = line["memory_ratio"].get(MEGASNN)
    return [
        line["row"],
        f"{line['layout']['ranks']} x {line['threads']}",
        f"{step['median']:.1f}",
        quartiles(step, ".1f"),
        f"{line['samples_per_s']:.1f}",
        _ratio(line, MEGASNN),
        _ratio(line, SPIKINGJELLY),
        f"{line['memory_mb']['largest']:.0f}",
        shown(memory_ratio, ".2f"),
        shown(line["activations_mb"], ".0f"),
        shown(line["activations_ratio"], ".3f"),
        str(calls),
        f"{moved:.2f}",
        f"{phases['forward_backward']:.1f}",
        f"{phases['optimizer']:.1f}",
        change(line, last, "step_ms", "median"),
        change(line, last, "memory_mb", "largest"),
    ]


def _ratio(line: Line, reference: str) -> str:
    ratio = line["throughput_ratio"].get(reference)
    return shown(ratio and ratio["median"], ".2f")


def brief(lines: Sequence[Line]) -> str:
    """One rank against SpikingJelly, then each layout against one rank: throughput with quartiles, memory."""
    said = []
    for line in lines:
        references = (SPIKINGJELLY, COMPILED) if line["row"] == MEGASNN else (MEGASNN,)
        same_threads = line["threads"] == 1 and not line["row"].startswith(SPIKINGJELLY)
        said += [_comparison(line, each) for each in references if same_threads and each in line["throughput_ratio"]]
    return "\n".join(said)


def _comparison(line: Line, reference: str) -> str:
    speed, memory = line["throughput_ratio"][reference], line["memory_ratio"][reference]
    stages = f"; layers {line['pipeline_layout']}" if line["pipeline_layout"] else ""
    return (
        f"{TITLES.get(line['row'], line['row'])}: {speed['median']:.2f} x the throughput of {TITLES[reference]} "
        f"(quartiles {quartiles(speed, '.2f')}), {memory:.2f} x its peak memory a rank{stages}"
    )


def _total_traffic(traffic: Mapping[str, Mapping[str, float]]) -> tuple[int, float]:
    """Calls and MB of one rank in one step, all groups together."""
    return int(sum(t["calls"] for t in traffic.values())), sum(t["mb"] for t in traffic.values())


LAYOUTS = Case(LayoutBenchmark, measure, report, NOTES)
