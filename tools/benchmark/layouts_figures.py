"""What the ranks of a layout say, and the figures of a row that follow from it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Any

from tools.benchmark.harness import Figures, ratios, summary
from tools.benchmark.layouts_flags import LayoutBenchmark
from tools.benchmark.layouts_rows import COMPILED, MEGASNN, SPIKINGJELLY, Row

REFERENCES = (MEGASNN, SPIKINGJELLY, COMPILED)
PHASES = "forward_backward", "forward", "backward", "reset", "optimizer"
SETUP = "plan", "materialise"
EVENTS = "warnings", "recompiles", "graph_breaks"


@dataclass(frozen=True)
class Preparation:
    """Attributes: pipeline layout, the last warm-up step's loss, calls and bytes moved in one step by group, and
    milliseconds of what came before the first step."""

    layout: str
    loss: float
    traffic: dict[str, dict[str, float]]
    setup_ms: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Turn:
    """Attributes: the clock at the start and after each step in s, seconds of each step's two parts, and milliseconds
    of what the first of them consists of, by name."""

    clock: list[float]
    forward_backward: list[float]
    update: list[float]
    parts_ms: dict[str, list[float]] = field(default_factory=dict)


@dataclass(frozen=True)
class Memory:
    """MB before the model was built, and at most since then; and what forward and backward take at their peak, counted
    where it is taken, above weights, gradients and optimizer state: of our rows."""

    baseline: float
    peak: float
    activations: float | None


@dataclass
class Measurements:
    """Everything the ranks of a row have said, in rank order; one entry of `turns` per round."""

    preparations: list[Preparation]
    turns: list[list[Turn]] = field(default_factory=list)
    memory: list[Memory] = field(default_factory=list)
    events: list[dict[str, int]] = field(default_factory=list)


def step_times(turn: Sequence[Turn]) -> list[float]:
    """Seconds of each step of a turn. A step ends when its last rank has finished it, and then the next one begins."""
    ends = [max(clocks) for clocks in zip(*(rank.clock for rank in turn), strict=True)]
    return [end - start for start, end in zip(ends, ends[1:], strict=False)]


def figures(flags: LayoutBenchmark, measured: Mapping[Row, Measurements]) -> list[Figures]:
    """The figures of every row, as they are logged."""
    results = [_own_figures(flags, row, data) for row, data in measured.items()]
    by_name = {result["row"]: result for result in results}
    for result in results:
        result["throughput_ratio"] = {
            name: _throughput_ratio(result, by_name[name]) for name in REFERENCES if name in by_name
        }
        result["memory_ratio"] = {
            name: result["memory_mb"]["largest"] / by_name[name]["memory_mb"]["largest"]
            for name in REFERENCES
            if name in by_name
        }
        own, alone = (each["activations_mb"] for each in (result, by_name.get(MEGASNN, result)))
        result["activations_ratio"] = own / alone if own and alone and MEGASNN in by_name else None
    return results


def _own_figures(flags: LayoutBenchmark, row: Row, measured: Measurements) -> Figures:
    rounds = [[1e3 * seconds for seconds in step_times(turn)] for turn in measured.turns]
    step_ms = summary([ms for turn in rounds for ms in turn])
    samples, first = flags.samples(row), measured.preparations[0]
    rate = 1e3 * samples / step_ms["median"]
    activations = [memory.activations for memory in measured.memory if memory.activations is not None]
    phases = {name: _phase(measured, name) for name in PHASES}
    peaks = [max(memory.peak - memory.baseline, 0.0) for memory in measured.memory]
    return {
        "row": row.name,
        "regime": flags.regime,
        "layout": {axis: getattr(row, axis) for axis in ("data", "tensor", "pipeline", "context", "ranks")},
        "threads": row.threads,
        "samples": samples,
        "replicas": row.data,
        "samples_per_replica": samples / row.data,
        "samples_per_rank": samples / row.ranks,
        "micro_batches_per_replica": row.micro_batches,
        "micro_batch_size": flags.micro_batch_size(row),
        "pipeline_layout": first.layout,
        "step_ms": step_ms,
        "round_ms": [median(turn) for turn in rounds],
        "samples_per_s": rate,
        "samples_per_s_per_rank": rate / row.ranks,
        "phases_ms": {name: each and each["median"] for name, each in phases.items()},
        "phases_spread_ms": phases,
        "setup_ms": {name: _longest(measured, name) for name in SETUP},
        "memory_mb": {
            "largest": max(peaks),
            "above_baseline": peaks,
            "baseline": [memory.baseline for memory in measured.memory],
        },
        "activations_mb": max(activations, default=None),
        "tensor_parallel": _of_group(measured, "tensor"),
        **{name: sum(each[name] for each in measured.events) for name in EVENTS},
        "traffic": [preparation.traffic for preparation in measured.preparations],
        "loss": first.loss,
        "rounds": len(rounds),
        "steps": len(rounds[0]),
        "configuration": flags.identity(row),
        "flags": {name: value for name, value in asdict(flags).items() if name != "output"},
    }


def _phase(measured: Measurements, name: str) -> dict[str, float] | None:
    """Of one part of the step in ms, on the rank where it takes longest; None where there is no such part."""
    ranks = [[ms for turn in turns for ms in _of_turn(turn, name)] for turns in zip(*measured.turns, strict=True)]
    return max((summary(each) for each in ranks if each), key=lambda found: found["median"], default=None)


def _of_turn(turn: Turn, name: str) -> list[float]:
    whole = {"forward_backward": turn.forward_backward, "optimizer": turn.update}
    return [1e3 * seconds for seconds in whole[name]] if name in whole else turn.parts_ms.get(name, [])


def _longest(measured: Measurements, name: str) -> float | None:
    """Of what came before the first step; None where there is no such part."""
    return max((each.setup_ms[name] for each in measured.preparations if name in each.setup_ms), default=None)


def _of_group(measured: Measurements, group: str) -> dict[str, float]:
    """Calls and MB of a step within one kind of group, on the rank that moves most there."""
    nothing = {"calls": 0, "mb": 0.0}
    of_ranks = [each.traffic.get(group, nothing) for each in measured.preparations]
    most = max(of_ranks, key=lambda each: each["mb"])
    return {name: most[name] for name in nothing}


def _throughput_ratio(result: Mapping[str, Any], reference: Mapping[str, Any]) -> dict[str, float]:
    size = result["samples"] / reference["samples"]
    return ratios([size * ms for ms in reference["round_ms"]], result["round_ms"])
