"""The log line, log.jsonl and the console: what they show, and that nothing there ends a run."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from datetime import datetime
from math import inf, nan

import pytest

from megasnn.telemetry.log import BestEffort, Console, JsonLog
from megasnn.telemetry.records import (
    EvaluationRecord,
    IterationRecord,
    format_duration,
    format_evaluation,
    format_iteration,
)
from tests.small_disk import fill, small_disk

NOW = datetime(2026, 2, 3, 4, 5, 6)
RECORD = dict(
    iteration=20, train_iters=200, epoch=0.8906, consumed_samples=1280, elapsed_ms=812.44, learning_rate=1e-3,
    global_batch_size=64, loss=2.3, accuracy=0.2547, grad_norm=1.2, samples_per_second=78.77, seconds_left=146.2,
)  # fmt: skip


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_the_line_reads_as_in_megatron_and_fits_a_screen() -> None:
    line = format_iteration(IterationRecord(**RECORD), now=NOW)
    assert line == (
        "[02-03 04:05:06] iteration  20/ 200 | epoch: 0.89 | samples/s: 78.8 | learning rate: 1.00E-03 | "
        "loss: 2.3000 | accuracy: 25.5 % | grad norm: 1.200 | ETA: 2:26"
    )


def test_nan_is_shown_and_what_went_wrong_is_counted() -> None:
    wrong = {"skipped_iterations": 2, "nan_iterations": 3, "skipped_samples": 4}
    line = format_iteration(IterationRecord(**{**RECORD, "loss": nan}, **wrong))
    assert "| loss: nan |" in line
    assert line.endswith("skipped iterations: 2 | number of nan iterations: 3 | number of skipped samples: 4")
    assert "number of" not in format_iteration(IterationRecord(**RECORD))


def test_durations_and_evaluations() -> None:
    seconds = (0.4, 61, 605, 3599.7, 3723, 90000)
    assert [*map(format_duration, seconds)] == ["0:00", "1:01", "10:05", "1:00:00", "1:02:03", "1 day, 1:00:00"]
    line = format_evaluation(EvaluationRecord(100, 6400, 360, loss=0.25, top1=0.9166, top5=1.0), NOW)
    assert "iteration 100 | validation samples: 360 | validation loss: 0.2500 | top-1 accuracy: 91.66 %" in line


def strict(text: str) -> list[dict]:
    """The lines of a file as JSON without words for nan."""

    def refuse(word: str) -> None:
        raise AssertionError(f"{word} is no JSON")

    return [json.loads(line, parse_constant=refuse) for line in text.splitlines()]


def test_every_line_of_the_json_log_is_an_object_with_time_and_kind(tmp_path) -> None:
    JsonLog(tmp_path / "new").add("iteration", {"loss": nan, "norms": (1.0, -inf), "layers": {"a": {"rate": 0.5}}})
    JsonLog(tmp_path / "new").add("message", {"text": "two\nlines"})  # a run that continues
    first, second = strict((tmp_path / "new" / "log.jsonl").read_text())
    assert datetime.fromisoformat(first.pop("time")).tzinfo is not None
    assert first == {"kind": "iteration", "loss": "nan", "norms": [1.0, "-inf"], "layers": {"a": {"rate": 0.5}}}
    assert second["text"] == "two\nlines"


def test_without_a_folder_no_json_log_is_written(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    JsonLog(None).add("start", {})
    assert list(tmp_path.iterdir()) == []


def test_lines_behind_a_full_disk_are_whole(tmp_path) -> None:
    with small_disk(tmp_path / "disk", "64k") as disk:
        log = JsonLog(disk)
        ballast = fill(disk, 4096)
        with pytest.raises(OSError, match="No space"):
            for number in range(1, 1000):
                log.add("message", {"number": number, "text": "x" * 1000})
        ballast.unlink()
        log.add("message", {"number": -1})
        last = (disk / "log.jsonl").read_text().splitlines()[-1]
        assert json.loads(last)["number"] == -1


def test_an_error_in_reporting_is_told_once_and_goes_no_further() -> None:
    told: list[str] = []
    best_effort = BestEffort(told.append)
    for name in ("pictures", "pictures", "flags"):
        with best_effort(name):
            raise ValueError("no font")
    assert len(told) == 2 and "pictures" in told[0] and "no font" in told[0] and "flags" in told[1]


def test_without_a_terminal_there_are_only_lines_and_quiet_ranks_say_nothing(capsys) -> None:
    for quiet in (False, True):
        console = Console(total=3, quiet=quiet)
        console.advance(loss="1.0")
        console.line("one")
        console.close()
    assert capsys.readouterr() == ("one\n", "")


def test_the_bar_continues_where_the_run_was_and_steps_aside_for_lines(monkeypatch) -> None:
    screen = Terminal()  # a terminal shows both streams
    monkeypatch.setattr(sys, "stderr", screen)
    monkeypatch.setattr(sys, "stdout", screen)
    console = Console(total=10, done=4)
    console.line("a line")
    console.advance(loss="0.5")
    console.close()
    before, after = screen.getvalue().split("a line\n")
    assert before.endswith("\r") and "4/10" in after and "5/10" in after and "loss=0.5" in after


CLOSED = """
import os, sys
from megasnn.telemetry.log import Console
console = Console(3)
sys.stdin.readline()  # the reader has gone
for number in range(3):
    console.line("a line")
console.close()
"""


def test_a_closed_pipe_ends_nothing() -> None:
    start = [sys.executable, "-c", CLOSED]
    with subprocess.Popen(start, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        process.stdout.close()
        process.stdin.write(b"\n")
        process.stdin.close()
        assert process.wait(60) == 0 and process.stderr.read() == b""
