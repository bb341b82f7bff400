"""The log line, log.jsonl, the console and the reporter: what they show, and that nothing there ends a run."""

from __future__ import annotations

import json
import os
import pty
import re
import subprocess
import sys
import termios
from datetime import datetime
from math import inf, nan
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from megasnn.telemetry import reporter as module
from megasnn.telemetry.log import BestEffort, Console, JsonLog
from megasnn.telemetry.operations import LayerOperations
from megasnn.telemetry.records import (
    EvaluationRecord,
    IterationRecord,
    RunOutline,
    StepResult,
    format_duration,
    format_evaluation,
    format_for_terminal,
    format_iteration,
)
from megasnn.telemetry.reporter import Reporter
from megasnn.telemetry.spikes import LayerSpikes

NOW = datetime(2026, 2, 3, 4, 5, 6)
RECORD = dict(
    iteration=20, train_iters=200, epoch=0.8906, consumed_samples=1280, elapsed_ms=812.44, learning_rate=1e-3,
    global_batch_size=64, loss=2.3, metrics={"accuracy": 0.2547}, grad_norm=1.2, samples_per_second=78.77,
    seconds_left=146.2,
)  # fmt: skip


def test_lines_read_as_in_megatron_and_count_errors() -> None:
    assert format_iteration(IterationRecord(**RECORD), now=NOW) == (
        "[02-03 04:05:06] iteration  20/ 200 | epoch: 0.89 | samples/s: 78.8 | learning rate: 1.00E-03 | "
        "loss: 2.3000 | accuracy: 25.5 % | grad norm: 1.200 | ETA: 2:26"
    )
    wrong = {"skipped_iterations": 2, "nan_iterations": 3, "skipped_samples": 4}
    line = format_iteration(IterationRecord(**{**RECORD, "loss": nan}, **wrong))
    assert "| loss: nan |" in line
    assert line.endswith("skipped iterations: 2 | number of nan iterations: 3 | number of skipped samples: 4")
    seconds = (0.4, 61, 605, 3599.7, 3723, 90000)
    assert [*map(format_duration, seconds)] == ["0:00", "1:01", "10:05", "1:00:00", "1:02:03", "1 day, 1:00:00"]
    line = format_evaluation(EvaluationRecord(100, 6400, 360, loss=0.25, metrics={"top1": 0.9166, "iou": 0.5}), NOW)
    shown = "iteration 100 | validation samples: 360 | validation loss: 0.2500 | top-1 accuracy: 91.66 % | iou: 0.5000"
    assert shown in line


def test_lines_on_a_terminal_fit_a_hundred_columns() -> None:
    assert format_for_terminal(IterationRecord(**RECORD), now=NOW) == (
        "04:05:06  20/200  epoch 0.89  loss 2.3000  accuracy 25.5 %  lr 1.00E-03  78.8 samples/s  2:26 left"
    )
    long = {"iteration": 123456, "train_iters": 250000, "epoch": 299.99, "samples_per_second": 12345.6}
    metrics = {"accuracy": 0.5, "intersection_over_union": 0.25}
    line = format_for_terminal(IterationRecord(**{**RECORD, **long, "metrics": metrics}, skipped_iterations=2), now=NOW)
    assert line == "04:05:06  123456/250000  loss 2.3000  accuracy 50.0 %  2 skipped iterations"


def test_the_form_of_a_line_depends_on_the_terminal(tmp_path, monkeypatch, capsys) -> None:
    for is_terminal, shown in ((False, "iteration 1/ 4 | epoch: 0.20"), (True, " 1/4  epoch 0.20")):
        monkeypatch.setattr(sys.stdout, "isatty", lambda is_terminal=is_terminal: is_terminal)
        reporter = Reporter(RunOutline(4, 50), is_writer=True)
        reporter.step(StepResult(2.0, {}, 10, 1.5, 0.1))
        reporter.log(1, 10, {})
        reporter.close()
        out, err = capsys.readouterr()
        assert shown in out and err == ""


BAR = """
import sys, time
from megasnn.telemetry.log import Console
console = Console()
for number in range(1, 4):
    console.advance(number, 3)
    time.sleep(0.15)
    console.line(f"line {number}")
console.close_bar()
"""


def test_a_terminal_has_a_bar_below_its_lines_and_a_file_has_none() -> None:
    master, terminal = pty.openpty()
    termios.tcsetwinsize(terminal, (24, 80))
    ended = subprocess.run([sys.executable, "-c", BAR], stdout=terminal, stderr=terminal, timeout=60)
    os.close(terminal)
    shown = os.read(master, 1 << 16).decode()
    os.close(master)
    assert ended.returncode == 0 and "2/3 [" in shown
    # The bar is cleared before a line.
    for number in range(1, 4):
        assert re.search(rf"(^|\r|\n)line {number}\r\n", shown)
    in_file = subprocess.run([sys.executable, "-c", BAR], capture_output=True, text=True, timeout=60)
    assert in_file.stdout == "line 1\nline 2\nline 3\n" and in_file.stderr == ""


def test_every_line_of_the_json_log_is_an_object_with_time_and_kind(tmp_path) -> None:
    def refuse(word: str) -> None:
        raise AssertionError(f"{word} is no JSON")

    JsonLog(tmp_path / "new").add("iteration", {"loss": nan, "norms": (1.0, -inf), "layers": {"a": {"rate": 0.5}}})
    JsonLog(tmp_path / "new").add("message", {"text": "two\nlines"})  # a run that continues
    lines = (tmp_path / "new" / "log.jsonl").read_text().splitlines()
    first, second = (json.loads(line, parse_constant=refuse) for line in lines)
    assert datetime.fromisoformat(first.pop("time")).tzinfo is not None
    assert first == {"kind": "iteration", "loss": "nan", "norms": [1.0, "-inf"], "layers": {"a": {"rate": 0.5}}}
    assert second["text"] == "two\nlines"


def test_an_error_in_reporting_is_told_once_and_goes_no_further() -> None:
    told: list[str] = []
    best_effort = BestEffort(told.append)
    for name in ("pictures", "pictures", "flags"):
        with best_effort(name):
            raise ValueError("no font")
    assert len(told) == 2 and "pictures" in told[0] and "no font" in told[0] and "flags" in told[1]


def test_a_quiet_console_shows_nothing(capsys) -> None:
    for quiet in (False, True):
        Console(quiet).line("one")
    assert capsys.readouterr() == ("one\n", "")


CLOSED = """
import os, sys
from megasnn.telemetry.log import Console
console = Console()
sys.stdin.readline()  # the reader has gone
for number in range(3):
    console.line("a line")
"""


def test_a_closed_pipe_ends_nothing() -> None:
    start = [sys.executable, "-c", CLOSED]
    with subprocess.Popen(start, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        process.stdout.close()
        process.stdin.write(b"\n")
        process.stdin.close()
        assert process.wait(60) == 0 and process.stderr.read() == b""


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
        reporter.step(StepResult(2.0 - number / 4, {"top1": number}, 10, 1.5, 0.1, skipped=number == 1))
    with reporter.pause():
        clock[0] += 2.0  # an evaluation: no part of the time of an iteration, but of the time left
    reporter.log(4, 40, {"time/data_ms": 3.0}, [LayerSpikes("a", 0.5, 0.0, 0.0)], skipped_samples=2)
    clock[0] += 0.5
    reporter.step(StepResult(nan, {"top1": 0}, 10, nan, 0.1))
    reporter.log(5, 50, {})
    operations = [LayerOperations("input", 8.0, 0.0), LayerOperations("a", 0.0, 50.0)]
    reporter.evaluation(EvaluationRecord(5, 50, 5, 1.0, {"top1": 0.5, "iou": 1.0}), operations)
    reporter.close()
    (evaluation,) = entries(tmp_path, "validation")
    assert evaluation["validation/effective_acs"] == 50 and evaluation["validation/effective_macs"] == 8
    assert evaluation["layers"] == {"input": {"macs": 8, "acs": 0}, "a": {"macs": 0, "acs": 50}}
    line, after = entries(tmp_path, "iteration")
    assert line["loss"] == 1.625 and line["accuracy"] == 6 / 40 and line["samples_per_second"] == 20.0
    assert line["elapsed_ms"] == 500 and line["epoch"] == 0.8 and line["skipped_iterations"] == 1
    assert line["seconds_left"] == 36 * 4.0 / 4
    assert line["time/data_ms"] == 3.0 and line["layers"]["a"]["firing_rate"] == 0.5
    assert after["loss"] == after["grad_norm"] == "nan" and after["nan_iterations"] == 1
    shown = capsys.readouterr().out
    assert "epoch: 0.80 | samples/s: 20.0 |" in shown and "ETA: 0:36 | number of skipped iterations: 1" in shown
    tags = EventAccumulator(str(tmp_path)).Reload().Tags()["scalars"]
    assert {"1_training/2_accuracy", "3_spikes/1_firing_rate", "4_time/data_ms", "8_data/skipped_samples"} <= set(tags)
    assert {"2_validation/2_accuracy_top1", "2_validation/iou"} <= set(tags)
    assert "3_spikes/2_silent" not in tags


def test_the_time_left_is_of_the_pace_behind_the_first_log_line(tmp_path, clock) -> None:
    reporter = Reporter(RunOutline(100, 50, log_directory=tmp_path, continued=(10, 100)), is_writer=True)
    clock[0] += 60.0  # to load and to predict memory
    reporter.begin()
    for iteration in range(11, 41):
        clock[0] += {11: 9.0}.get(iteration, 2.0 if iteration < 25 else 1.0)
        reporter.step(StepResult(1.0, {"top1": 1}, 10, 1.0, 0.1))
        reporter.log(iteration, 10 * iteration, {})
    lines = entries(tmp_path, "iteration")
    assert [line["elapsed_ms"] for line in lines[:3]] == [9000, 2000, 2000]
    assert [line["seconds_left"] for line in lines[:3]] == [89 * 9.0, 88 * 2.0, 87 * 2.0]
    assert lines[-1]["seconds_left"] == pytest.approx(60 * (13 * 2.0 + 16 * 1.0) / 29)


def test_other_ranks_write_nothing_and_a_folder_that_is_none_is_told_once(tmp_path, capsys) -> None:
    reporter = Reporter(RunOutline(2, 50, tmp_path, tmp_path), is_writer=False)
    reporter.line("a line")
    reporter.step(StepResult(1.0, {"top1": 1}, 10, 1.0, 0.1))
    reporter.log(1, 10, {})
    reporter.evaluation(EvaluationRecord(1, 10, 5, 1.0, {"top1": 0.5}))
    reporter.close()
    assert list(tmp_path.iterdir()) == [] and capsys.readouterr().out == ""
    (tmp_path / "file").write_text("where a folder should be")
    reporter = Reporter(RunOutline(2, 50, log_directory=tmp_path / "file"), is_writer=True)
    for text in ("first", "second"):
        reporter.line(text)
    shown = capsys.readouterr().out
    assert shown.count("WARNING") == 1 and "log.jsonl" in shown
