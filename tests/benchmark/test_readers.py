"""The benchmark of the readers, and the files that it makes."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from megasnn.events import SensorSize, read_recording
from tests.events import files
from tools.benchmark.program import main
from tools.benchmark.recordings import random_events, write_files


def test_the_files_hold_the_events(tmp_path: Path) -> None:
    sensor = SensorSize(128, 128)
    events = random_events(10_000, sensor)
    paths = write_files(events, sensor, tmp_path)
    assert len(paths) == 4
    for name, path in paths.items():
        read = read_recording(path, sensor_size=sensor).events
        # N-MNIST's files have too few bits for any time; there the events are evenly spread.
        fields = "xyp" if name == "N-MNIST" else "txyp"
        assert all(np.array_equal(getattr(read, field), getattr(events, field)) for field in fields), name


def test_a_run(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    own = files.write(tmp_path, "own.bin", files.atis(random_events(50, SensorSize(34, 34))))
    log = tmp_path / "log.jsonl"
    arguments = ["--readers", "--events", "5000", "--rounds", "2", "--output", str(log), "--files", str(own)]
    assert main(arguments) == 0
    assert main(arguments) == 0
    told = capfd.readouterr()
    assert "round 2/2" in told.err
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    names = [line["row"] for line in lines[: len(lines) // 2]]
    assert names == [line["row"] for line in lines[len(lines) // 2 :]]
    assert names[0] == "read AEDAT 2.0" and "read own.bin" in names and "10 frames by time" in names
    assert lines[0]["throughput_ratio"]["median"] > 0 and lines[0]["events_per_s"]["median"] > 1000
    assert "%" in told.out.splitlines()[-3]  # the second run is compared with the first


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        (["--events", "0"], "--events must be at least 1, got 0"),
        (["--files", "/missing.aedat"], "/missing.aedat is no file"),
    ],
)
def test_flags_without_sense(flags: list[str], problem: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--readers", *flags]) == 2
    assert problem in capsys.readouterr().err
