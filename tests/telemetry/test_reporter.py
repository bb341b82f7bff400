"""What comes together from single steps, for the log line, the JSON log and TensorBoard."""

from __future__ import annotations

import json
import sys
from math import nan
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from megasnn.telemetry import reporter as module
from megasnn.telemetry.records import EvaluationRecord, StepResult
from megasnn.telemetry.reporter import Reporter, RunOutline
from megasnn.telemetry.spikes import LayerSpikes
from tests.telemetry.test_log import Terminal


def entries(folder: Path, kind: str) -> list[dict]:
    lines = map(json.loads, (folder / "log.jsonl").read_text().splitlines())
    return [line for line in lines if line["kind"] == kind]


@pytest.fixture
def clock(monkeypatch):
    """A clock that a test sets."""
    now = [100.0]
    monkeypatch.setattr(module.time, "perf_counter", lambda: now[0])
    return now


def test_an_interval_is_summed_up(tmp_path, clock, capsys) -> None:
    reporter = Reporter(RunOutline(40, 50, tmp_path, tmp_path), is_writer=True)
    for number in range(4):
        clock[0] += 0.5
        reporter.step(StepResult(2.0 - number / 4, number, 10, 1.5, 0.1, skipped=number == 1))
    with reporter.pause():
        clock[0] += 2.0  # an evaluation: no part of the pace of training, but of the time left
    reporter.log(4, 40, {"time/data_ms": 3.0}, [LayerSpikes("a", 0.5, 0.0, 0.0)], skipped_samples=2)
    reporter.close()
    (line,) = entries(tmp_path, "iteration")
    assert line["loss"] == 1.625 and line["accuracy"] == 6 / 40 and line["samples_per_second"] == 20.0
    assert line["elapsed_ms"] == 500 and line["epoch"] == 0.8 and line["skipped_iterations"] == 1
    assert line["seconds_left"] == 36 * 3.5 / 3, "without the first step"
    assert line["time/data_ms"] == 3.0 and line["layers"]["a"]["firing_rate"] == 0.5
    shown = capsys.readouterr().out
    assert "epoch: 0.80 | samples/s: 20.0 |" in shown and "ETA: 0:42 | number of skipped iterations: 1" in shown
    tags = EventAccumulator(str(tmp_path)).Reload().Tags()["scalars"]
    assert {"1_training/2_accuracy", "3_spikes/1_firing_rate", "4_time/data_ms", "8_data/skipped_samples"} <= set(tags)
    assert "3_spikes/2_silent" not in tags


def test_nan_is_not_averaged_away(tmp_path, capsys) -> None:
    reporter = Reporter(RunOutline(2, 50, log_directory=tmp_path), is_writer=True)
    for loss in (1.0, nan):
        reporter.step(StepResult(loss, 0, 10, nan, 0.1, skipped=loss != 1.0))
    reporter.log(2, 20, {})
    (line,) = entries(tmp_path, "iteration")
    assert line["loss"] == line["grad_norm"] == "nan" and line["nan_iterations"] == 1
    assert "loss: nan" in capsys.readouterr().out


def test_the_pace_is_that_of_late(clock) -> None:
    reporter = Reporter(RunOutline(1000, 50), is_writer=False)
    for iteration in range(1, 31):
        clock[0] += 10.0 if iteration <= 15 else 1.0
        reporter.step(StepResult(1.0, 1, 10, 1.0, 0.1))
        left = reporter._seconds_left(iteration)
    assert left == 970.0


def test_neither_the_start_nor_the_first_step_is_in_the_pace(tmp_path, clock) -> None:
    reporter = Reporter(RunOutline(100, 50, log_directory=tmp_path, resumed=(10, 100)), is_writer=True)
    clock[0] += 60.0  # to load and to predict memory
    reporter.begin()
    for iteration, seconds in ((11, 9.0), (12, 2.0), (13, 2.0)):
        clock[0] += seconds
        reporter.step(StepResult(1.0, 1, 10, 1.0, 0.1))
        reporter.log(iteration, 10 * iteration, {})
    lines = entries(tmp_path, "iteration")
    assert [line["elapsed_ms"] for line in lines] == [9000, 2000, 2000]
    assert [line["seconds_left"] for line in lines] == [89 * 9.0, 88 * 2.0, 87 * 2.0]


def test_other_ranks_write_nothing(tmp_path, capsys) -> None:
    reporter = Reporter(RunOutline(2, 50, tmp_path, tmp_path), is_writer=False)
    reporter.line("a line")
    reporter.step(StepResult(1.0, 1, 10, 1.0, 0.1))
    reporter.log(1, 10, {})
    reporter.evaluation(EvaluationRecord(1, 10, 5, 1.0, 0.5, 1.0))
    reporter.close()
    assert list(tmp_path.iterdir()) == [] and capsys.readouterr().out == ""


def test_a_json_log_that_cannot_be_written_is_told_once(tmp_path, capsys) -> None:
    (tmp_path / "file").write_text("where a folder should be")
    reporter = Reporter(RunOutline(2, 50, log_directory=tmp_path / "file"), is_writer=True)
    for text in ("first", "second"):
        reporter.line(text)
    (tmp_path / "file").unlink()
    reporter.line("third")
    shown = capsys.readouterr().out
    assert shown.count("WARNING") == 1 and "log.jsonl" in shown
    assert [line["text"] for line in entries(tmp_path / "file", "message")] == ["third"]


def test_the_bar_shows_loss_and_accuracy(monkeypatch) -> None:
    screen = Terminal()
    monkeypatch.setattr(sys, "stderr", screen)
    reporter = Reporter(RunOutline(4, 50), is_writer=True)
    reporter.step(StepResult(0.5, 3, 4, 1.0, 0.1))
    reporter.close()
    assert "1/4" in screen.getvalue() and "loss=0.500, accuracy=75%" in screen.getvalue()
