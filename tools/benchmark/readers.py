"""Events a second of the readers of recordings and of the integration into frames, beside SpikingJelly's.

Files are made on the spot, with random events; what is timed is opening, decoding and checking them, from the cache of
the operating system. Rows take turns, so that a machine whose speed drifts slows all of them.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Literal

from megasnn.config.checks import at_least
from megasnn.events import Events, FrameOptions, SensorSize, events_to_frames, read_recording
from tools.benchmark.harness import Case, Figures, Flags, Part, ratios, rounds, seconds, summary
from tools.benchmark.log import Line
from tools.benchmark.recordings import random_events, write_files
from tools.benchmark.spikingjelly_events import cifar10_dvs, utils
from tools.benchmark.table import change, table

SENSOR = SensorSize(128, 128)
HEADINGS = ("", "million events/s", "quartiles", "SpikingJelly", "ratio", "change")


@dataclass(frozen=True)
class ReaderBenchmark(Flags):
    """One row for each format, and for each of the given files."""

    files: tuple[Path, ...] = ()
    """Recordings to read as well."""
    sensor_size: tuple[int, int] | None = None
    """Height and width of the sensor of --files that do not say it."""
    events: int = 1_000_000
    """Events in each file that is made."""
    rounds: int = 7
    """How often each row has its turn; one untimed turn comes before."""

    def problems(self) -> list[str]:
        missing = [f"--files {path} is no file" for path in self.files if not path.is_file()]
        return at_least(self, 1, "events", "rounds") + missing


@dataclass(frozen=True)
class ReaderRow:
    """Attributes: what the table calls it, the events it handles, ours, and SpikingJelly's where it has one."""

    name: str
    events: int
    ours: Callable[[], object]
    theirs: Callable[[], object] | None = None


def measure(flags: ReaderBenchmark) -> Iterator[Part]:
    """Raises RecordingError when one of the given files cannot be used."""
    with tempfile.TemporaryDirectory(prefix="megasnn-benchmark-") as folder:
        yield Part(_measure(flags, _rows(flags, Path(folder))))


def _rows(flags: ReaderBenchmark, folder: Path) -> list[ReaderRow]:
    events = random_events(flags.events, SENSOR)
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
    for path in flags.files:
        ours = partial(read_recording, path, sensor_size=flags.sensor_size)
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


def _measure(flags: ReaderBenchmark, rows: list[ReaderRow]) -> list[Figures]:
    ours: list[list[float]] = [[] for _ in rows]
    theirs: list[list[float]] = [[] for _ in rows]
    for _ in rounds(flags.rounds, untimed=1):
        for row, our_rates, their_rates in zip(rows, ours, theirs, strict=True):
            our_rates.append(row.events / seconds(row.ours))
            if row.theirs is not None:
                their_rates.append(row.events / seconds(row.theirs))
    return [_figures(flags, *row) for row in zip(rows, ours, theirs, strict=True)]


def _figures(flags: ReaderBenchmark, row: ReaderRow, ours: list[float], theirs: list[float]) -> Figures:
    """The figures of a row without the first, untimed turn. Ratios are taken round by round."""
    figures: Figures = {
        "row": row.name,
        "configuration": {"row": row.name, "events": row.events},
        "events_per_s": summary(ours[1:]),
        "flags": {name: value for name, value in asdict(flags).items() if name != "output"},
    }
    if theirs:
        figures["spikingjelly_events_per_s"] = summary(theirs[1:])
        figures["throughput_ratio"] = ratios(ours[1:], theirs[1:])
    return figures


def report(flags: ReaderBenchmark, lines: Sequence[Line], earlier: Sequence[Line | None]) -> str:
    headline = f"{flags.events} events a file, {flags.rounds} rounds; {lines[0]['machine']['cpu']}, one core"
    return f"{headline}\n\n{table(HEADINGS, list(map(_cells, lines, earlier)))}"


def _cells(line: Line, last: Line | None) -> list[str]:
    rate, theirs = line["events_per_s"], line.get("spikingjelly_events_per_s")
    return [
        line["row"],
        _millions(rate["median"]),
        f"{_millions(rate['q1'])}..{_millions(rate['q3'])}",
        _millions(theirs["median"]) if theirs else "-",
        f"{line['throughput_ratio']['median']:.1f}" if theirs else "-",
        change(line, last, "events_per_s", "median"),
    ]


def _millions(rate: float) -> str:
    return f"{rate / 1e6:.1f}"


READERS = Case(ReaderBenchmark, measure, report)
