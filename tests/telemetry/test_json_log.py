from __future__ import annotations

import json
from datetime import datetime
from math import inf, nan

import pytest

from megasnn.telemetry.json_log import JsonLog
from tests.small_disk import fill, small_disk


def strict(text: str) -> list[dict]:
    def refuse(word: str) -> None:
        raise AssertionError(f"{word} is no JSON")

    return [json.loads(line, parse_constant=refuse) for line in text.splitlines()]


def test_every_line_is_an_object_with_time_and_kind(tmp_path):
    log = JsonLog(tmp_path / "new")
    log.add("iteration", {"loss": nan, "norms": (1.0, -inf), "layers": {"a": {"rate": 0.5}}, "count": 3})
    log.add("message", {"text": "two\nlines"})
    log.flush()
    first, second = strict((tmp_path / "new" / "log.jsonl").read_text())
    assert datetime.fromisoformat(first.pop("time")).tzinfo is not None
    expected = {"kind": "iteration", "loss": "nan", "norms": [1.0, "-inf"], "layers": {"a": {"rate": 0.5}}, "count": 3}
    assert first == expected
    assert second["kind"] == "message" and second["text"] == "two\nlines"


def test_a_run_that_continues_adds_to_the_file(tmp_path):
    for number in range(2):
        log = JsonLog(tmp_path)
        log.add("start", {"iteration": number})
        log.flush()
    assert [line["iteration"] for line in strict((tmp_path / "log.jsonl").read_text())] == [0, 1]


def test_without_a_folder_nothing_is_written(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    log = JsonLog(None)
    log.add("start", {})
    log.flush()
    assert list(tmp_path.iterdir()) == []


def test_what_a_full_disk_refused_is_written_when_there_is_room(tmp_path):
    with small_disk(tmp_path / "disk", "64k") as disk:
        log = JsonLog(disk)
        log.add("message", {"number": 0})
        log.flush()
        ballast = fill(disk, 0)
        with pytest.raises(OSError, match="No space"):
            for number in range(1, 1000):
                log.add("message", {"number": number, "text": "x" * 1000})
                log.flush()
        ballast.unlink()
        log.add("message", {"number": -1})
        log.flush()
        numbers = [line["number"] for line in strict((disk / "log.jsonl").read_text())]
        assert numbers == [*range(len(numbers) - 1), -1] and len(numbers) > 2


def test_the_oldest_of_what_waits_goes_first(tmp_path):
    log = JsonLog(tmp_path, most_waiting_bytes=1000)
    for number in range(100):
        log.add("message", {"number": number, "text": "x" * 200})
    log.flush()
    numbers = [line["number"] for line in strict((tmp_path / "log.jsonl").read_text())]
    assert numbers == [97, 98, 99] and (tmp_path / "log.jsonl").stat().st_size <= 1000
