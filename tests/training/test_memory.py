"""Memory that is said beforehand, and what a run then takes."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from unittest import mock

from megasnn.preprocess.sample import shards_of_sample
from megasnn.training import memory
from tests.training.runs import train


def test_a_run_without_a_forecast_trains(tmp_path_factory, tmp_path, monkeypatch) -> None:
    def refuse(*_: object) -> None:
        raise MemoryError("for a reason")

    monkeypatch.setattr(memory, "count_memory", refuse)
    flags = ("--train-iters", "1", "--log-interval", "1", "--eval-iters", "0", "--tensorboard-dir", str(tmp_path))
    assert train(str(tmp_path_factory.mktemp("cache")), *flags).iteration == 1
    lines = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert "memory is not predicted: MemoryError: for a reason" in [line.get("text") for line in lines]
    (end,) = [line for line in lines if line["kind"] == "memory"]
    assert end["predicted_mb"] == [] and end["peak_mb"][0] > 100


def test_prediction_and_peak_are_told(ranks, tmp_path_factory, tmp_path) -> None:
    """Not compared here, where ranks have a past of other tests."""
    cache = str(tmp_path_factory.mktemp("cache"))
    larger = "--embed-dim 64 --image-size 32 --micro-batch-size 16 --global-batch-size 32 --time-steps 4".split()
    flags = (*larger, "--train-iters", "2", "--log-interval", "1", "--eval-iters", "0", "--save", str(tmp_path))
    ranks(2, train, cache, *flags, "--pipeline-model-parallel-size", "2")
    lines = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    texts = [line["text"] for line in lines if line["kind"] == "message"]
    (told,) = [text for text in texts if text.startswith("memory predicted for rank")]
    total, *parts = map(int, re.findall(r"\b(\d+)\b", told.split(": ", 1)[1]))
    assert abs(total - sum(parts)) <= len(parts), told
    (predicted,) = [line["mb"] for line in lines if line["kind"] == "memory_predicted"]
    assert len(predicted) == 2 and all(
        each["working"] > 0.1 and each["kept"] + each["working"] > 10 for each in predicted
    )
    assert all(each["messages"] > 0 for each in predicted)
    first, second = ({k: v for k, v in line.items() if "_mb" in k and "comm" in k} for line in lines if "loss" in line)
    assert first == second and bool(first), "the trial of the layers is no traffic of training"
    (end,) = [line for line in lines if line["kind"] == "memory"]
    assert end["predicted_mb"] == [each["total"] for each in predicted]
    assert any("measured / predicted" in text for text in texts)
    for peak, each in zip(end["peak_mb"], predicted, strict=True):
        assert peak > each["total"] - each["working"] - each["kept"]


def test_prediction_and_peak_agree_in_fresh_processes_and_loaded_state_counts_once(tmp_path) -> None:
    flags = "--embed-dim 512 --num-heads 8 --depth 4 --train-iters 2 --log-interval 1 --eval-iters 0 --save".split()
    found = []
    # Written here, so that not the first run alone imports scikit-learn for it.
    with mock.patch.dict(os.environ, MEGASNN_CACHE=str(tmp_path)):
        shards_of_sample(events=False)
    for more in (("--exit-interval", "1"), ("--load", str(tmp_path / "run"))):
        arguments = [str(tmp_path), *flags, str(tmp_path / "run"), *more]
        program = f"from tests.training.runs import train; train(*{arguments})"
        subprocess.run([sys.executable, "-c", program], cwd=Path(__file__).parents[2], check=True, timeout=100)
    for line in map(json.loads, (tmp_path / "run" / "log.jsonl").read_text().splitlines()):
        found += line["mb"] if line["kind"] == "memory_predicted" else []
        if line["kind"] == "memory":
            (predicted,), (peak,) = line["predicted_mb"], line["peak_mb"]
            assert 0.8 < peak / predicted < 1.25
    fresh, resumed = found
    assert resumed["optimizer"] == fresh["optimizer"] > 50
    assert abs(resumed["program"] - fresh["program"]) < resumed["optimizer"] / 2
