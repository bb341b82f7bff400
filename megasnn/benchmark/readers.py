"""Events a second of the readers of recordings and of the integration into frames, beside SpikingJelly's.

Files are made on the spot, with random events; what is timed is opening, decoding and checking them, from the cache of
the operating system. Rows take turns, so that a machine whose speed drifts slows all of them.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

from megasnn.benchmark.log import append_lines, latest_alike, read_lines, surroundings
from megasnn.benchmark.recordings import random_events, write_files
from megasnn.benchmark.results import summary
from megasnn.benchmark.spikingjelly_events import cifar10_dvs, utils
from megasnn.config.checks import ConfigError, at_least
from megasnn.events import Events, FrameOptions, SensorSize, events_to_frames, read_recording

SENSOR = SensorSize(128, 128)


@dataclass(frozen=True)
class ReaderBenchmark:
    """One row for each format, and for each of the given files."""

    files: tuple[Path, ...] = ()
    """Recordings to read as well."""
    sensor_size: tuple[int, int] | None = None
    """Height and width of the sensor of --files that do not say it."""
    events: int = 1_000_000
    """Events in each file that is made."""
    rounds: int = 7
    """How often each row has its turn; one untimed turn comes before."""
    output: Path = Path("benchmark.jsonl")
    """File to append one JSON line per row to; earlier lines in it are compared with."""

    def check(self) -> None:
        """Raises ConfigError with everything that cannot be run."""
        wrong = at_least(self, 1, "events", "rounds")
        wrong += [f"--files {path} is no file" for path in self.files if not path.is_file()]
        if wrong:
            raise ConfigError(wrong)


@dataclass(frozen=True)
class ReaderRow:
    """Attributes: what the table calls it, the events it handles, ours, and SpikingJelly's where it has one."""

    name: str
    events: int
    ours: Callable[[], object]
    theirs: Callable[[], object] | None = None


def run_readers(config: ReaderBenchmark) -> list[dict[str, Any]]:
    """Measures, prints the table, appends to the log. Returns the lines that were appended.

    Raises:
        ConfigError: values out of range, or files that are not there.
        RecordingError: one of the given files cannot be used.
        ValueError: the log holds a line that is not JSON.
    """
    config.check()
    earlier = read_lines(config.output)
    with tempfile.TemporaryDirectory(prefix="megasnn-benchmark-") as folder:
        rows = _rows(config, Path(folder))
        lines = [{**surroundings(None), **line} for line in _measure(config, rows)]
    append_lines(config.output, lines)
    machine = lines[0]["machine"]
    print(f"\n{config.events} events a file, {config.rounds} rounds; {machine['cpu']}, one core\n")
    print(_table(lines, [latest_alike(line, earlier) for line in lines]))
    print(f"\nappended to {config.output}")
    return lines


def _rows(config: ReaderBenchmark, folder: Path) -> list[ReaderRow]:
    events = random_events(config.events, SENSOR)
    spikingjelly: dict[str, Callable[[Path], object]] = {
        "AEDAT 2.0": cifar10_dvs()._load_origin_data,
        "AEDAT 3.1": utils().load_aedat_v3,
        "N-MNIST": utils().load_ATIS_bin,
    }
    rows = []
    for name, path in write_files(events, SENSOR, folder).items():
        ours = partial(read_recording, path, sensor_size=SENSOR)
        theirs = partial(spikingjelly[name], path) if name in spikingjelly else None
        rows.append(ReaderRow(f"read {name}", len(events), ours, theirs))
    for path in config.files:
        ours = partial(read_recording, path, sensor_size=config.sensor_size)
        rows.append(ReaderRow(f"read {path.name}", len(ours().events), ours))
    return rows + [_frames_row(events, "number"), _frames_row(events, "time")]


def _frames_row(events: Events, split_by: Literal["number", "time"]) -> ReaderRow:
    arrays = {"t": events.t, "x": events.x, "y": events.y, "p": events.p}
    return ReaderRow(
        f"10 frames by {split_by}",
        len(events),
        partial(events_to_frames, events, SENSOR, FrameOptions(10, split_by)),
        partial(utils().integrate_events_by_fixed_frames_number, arrays, split_by, 10, *SENSOR),
    )


def _measure(config: ReaderBenchmark, rows: list[ReaderRow]) -> list[dict[str, Any]]:
    ours: list[list[float]] = [[] for _ in rows]
    theirs: list[list[float]] = [[] for _ in rows]
    for turn in range(config.rounds + 1):
        print(f"round {turn}/{config.rounds}", file=sys.stderr)
        for row, our_rates, their_rates in zip(rows, ours, theirs, strict=True):
            our_rates.append(row.events / _seconds(row.ours))
            if row.theirs is not None:
                their_rates.append(row.events / _seconds(row.theirs))
    return [_line(config, *row) for row in zip(rows, ours, theirs, strict=True)]


def _seconds(work: Callable[[], object]) -> float:
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


def _line(config: ReaderBenchmark, row: ReaderRow, ours: list[float], theirs: list[float]) -> dict[str, Any]:
    """The figures of a row without the first, untimed turn. Ratios are taken round by round."""
    line: dict[str, Any] = {
        "row": row.name,
        "configuration": {"row": row.name, "events": row.events},
        "events_per_s": summary(ours[1:]),
        "flags": {name: value for name, value in asdict(config).items() if name != "output"},
    }
    if theirs:
        line["spikingjelly_events_per_s"] = summary(theirs[1:])
        line["throughput_ratio"] = summary([a / b for a, b in zip(ours[1:], theirs[1:], strict=True)])
    return line


def _table(lines: list[dict[str, Any]], earlier: list[Any]) -> str:
    cells = [["", "million events/s", "quartiles", "SpikingJelly", "ratio", "change"]]
    for line, last in zip(lines, earlier, strict=True):
        rate, theirs = line["events_per_s"], line.get("spikingjelly_events_per_s")
        cells.append(
            [
                line["row"],
                _millions(rate["median"]),
                f"{_millions(rate['q1'])}..{_millions(rate['q3'])}",
                _millions(theirs["median"]) if theirs else "-",
                f"{line['throughput_ratio']['median']:.1f}" if theirs else "-",
                f"{rate['median'] / last['events_per_s']['median'] - 1:+.1%}" if last else "-",
            ]
        )
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return "\n".join(
        "  ".join([row[0].ljust(widths[0]), *(cell.rjust(w) for cell, w in zip(row[1:], widths[1:], strict=True))])
        for row in cells
    )


def _millions(rate: float) -> str:
    return f"{rate / 1e6:.1f}"
