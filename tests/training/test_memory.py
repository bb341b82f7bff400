"""Memory that is predicted before a run, and what the run then takes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from unittest import mock

from megasnn.preprocess.sample import shards_of_sample


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
