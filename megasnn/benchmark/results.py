"""From the clocks of the ranks to the figures of a row."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from statistics import median, quantiles
from typing import TYPE_CHECKING, Any

from megasnn.benchmark.config import BenchmarkConfig
from megasnn.benchmark.rows import MEGASNN, SPIKINGJELLY, Row

if TYPE_CHECKING:
    from megasnn.benchmark.worker import Memory, Preparation, Turn

REFERENCES = (MEGASNN, SPIKINGJELLY)


@dataclass
class Measurements:
    """Everything the ranks of a row have said, in rank order; one entry of `turns` per round."""

    preparations: list[Preparation]
    turns: list[list[Turn]] = field(default_factory=list)
    memory: list[Memory] = field(default_factory=list)


def step_times(turn: Sequence[Turn]) -> list[float]:
    """Seconds of each step of a turn. A step ends when its last rank has finished it, and then the next one begins."""
    ends = [max(clocks) for clocks in zip(*(rank.clock for rank in turn), strict=True)]
    return [end - start for start, end in zip(ends, ends[1:], strict=False)]


def summary(values: Sequence[float]) -> dict[str, float]:
    """Median, quartiles and extremes."""
    first, _, third = quantiles(values if len(values) > 1 else [*values] * 2, n=4, method="inclusive")
    return {"median": median(values), "q1": first, "q3": third, "min": min(values), "max": max(values)}


def figures(config: BenchmarkConfig, measured: Mapping[Row, Measurements]) -> list[dict[str, Any]]:
    """The figures of every row, as they are logged."""
    results = [_own_figures(config, row, data) for row, data in measured.items()]
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
    return results


def _own_figures(config: BenchmarkConfig, row: Row, measured: Measurements) -> dict[str, Any]:
    rounds = [[1e3 * seconds for seconds in step_times(turn)] for turn in measured.turns]
    step_ms = summary([ms for turn in rounds for ms in turn])
    samples, first = config.samples(row), measured.preparations[0]
    rate = 1e3 * samples / step_ms["median"]
    peaks = [max(memory.peak - memory.baseline, 0.0) for memory in measured.memory]
    return {
        "row": row.name,
        "layout": {"data": row.data, "tensor": row.tensor, "pipeline": row.pipeline, "ranks": row.ranks},
        "threads": row.threads,
        "samples": samples,
        "samples_per_replica": samples / row.data,
        "micro_batches_per_replica": row.micro_batches,
        "micro_batch_size": config.micro_batch_size(row),
        "pipeline_layout": first.layout,
        "step_ms": step_ms,
        "round_ms": [median(turn) for turn in rounds],
        "samples_per_s": rate,
        "samples_per_s_per_rank": rate / row.ranks,
        "phases_ms": {
            "forward_backward": _phase(measured, "forward_backward"),
            "optimizer": _phase(measured, "update"),
        },
        "memory_mb": {
            "largest": max(peaks),
            "above_baseline": peaks,
            "baseline": [memory.baseline for memory in measured.memory],
        },
        "traffic": [preparation.traffic for preparation in measured.preparations],
        "loss": first.loss,
        "rounds": len(rounds),
        "steps": len(rounds[0]),
        "configuration": config.identity(row),
        "flags": {name: value for name, value in asdict(config).items() if name != "output"},
    }


def _phase(measured: Measurements, name: str) -> float:
    """Median ms of one part of the step, on the rank where it takes longest."""
    ranks = zip(*measured.turns, strict=True)
    return max(1e3 * median(s for turn in turns for s in getattr(turn, name)) for turns in ranks)


def _throughput_ratio(result: Mapping[str, Any], reference: Mapping[str, Any]) -> dict[str, float]:
    """Compared round by round: what slows the machine for a while slows both."""
    size = result["samples"] / reference["samples"]
    pairs = zip(reference["round_ms"], result["round_ms"], strict=True)
    return summary([size * theirs / ours for theirs, ours in pairs])


def total_traffic(traffic: Mapping[str, Mapping[str, float]]) -> tuple[int, float]:
    """Calls and MB of one rank in one step, all groups together."""
    return int(sum(t["calls"] for t in traffic.values())), sum(t["mb"] for t in traffic.values())
