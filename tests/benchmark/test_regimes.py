"""Weak scaling and memory capacity: batches of the rows, and short runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from megasnn.config.checks import ConfigError
from tests.benchmark.test_layouts import TINY, lines
from tools.benchmark.__main__ import main
from tools.benchmark.harness import run
from tools.benchmark.layouts import figures
from tools.benchmark.regimes import Capacity, Weak
from tools.benchmark.steps import Facts, Turn

SHORT = "--rounds 1 --steps 1".split()


def test_the_global_batch_grows_with_the_ranks() -> None:
    case = Weak(rows=("megasnn", "dp2", "tp2dp2", "pp2:4"), global_batch_size=8)
    assert case.problems() == []
    works = {row: case.work(row) for row in case.parsed()}
    sizes = [(work.training.global_batch_size, work.training.micro_batch_size) for work in works.values()]
    assert sizes == [(8, 8), (16, 8), (32, 16), (16, 4)]
    # Each layout takes 1.25 times one rank's time.
    turns = {row: [[Turn([1.0 if row.ranks == 1 else 1.25])] * row.ranks] for row in works}
    facts = {row: [Facts(1.0, 1.0, 0, 0.0, None, None, None, None)] * row.ranks for row in works}
    one, dp2, four, _ = figures(works, turns, facts)
    assert dp2["samples_per_s"] == pytest.approx(1.6 * one["samples_per_s"])
    for found in (dp2, four):
        assert found["rank_batch_size"] == 8 and found["x_megasnn"].median == pytest.approx(0.8)
        assert found["samples_per_s_rank"] == pytest.approx(0.8 * one["samples_per_s_rank"])


@pytest.mark.parametrize(
    ("case", "named"),
    [
        (Weak(rows=("dp2:3",), global_batch_size=8), "row dp2:3: a global batch of 16"),
        (Capacity(rows=("spikingjelly",)), "row spikingjelly"),
        (Capacity(memory_mb=0), "--memory-mb"),
    ],
)
def test_regimes_without_sense_are_refused(case: Weak | Capacity, named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        run(case)


@pytest.mark.usefixtures("forked_ranks")
def test_a_short_run_of_capacity(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = tmp_path / "log"
    # Large images: their memory must be much more than a process's own memory varies.
    flags = ["--capacity", *TINY, "image_size=64", *SHORT, "--global-batch-size", "64", "--output", str(log)]
    assert main([*flags, "--memory-mb", "100000", "--rows", "megasnn", "megasnn:4", "tp2"]) == 0
    whole, parts, tp2 = lines(log)
    assert [each["micro_batch_size"] for each in (whole, parts, tp2)] == [64, 16, 64]
    assert tp2["predicted_mb"] < whole["predicted_mb"]
    limit = (whole["predicted_mb"] + parts["predicted_mb"]) / 2
    assert main([*flags, "--memory-mb", str(limit), "--rows", "megasnn"]) == 0
    limited = lines(log)[-1]
    assert 16 <= limited["micro_batch_size"] < 64 and limited["predicted_mb"] <= limit
    # Another limit is another configuration.
    assert "x_earlier" not in limited and limited["regime"] == "capacity"
    assert main([*flags, "--memory-mb", "10", "--rows", "megasnn"]) == 1
    assert "--micro-batch-size auto: a micro-batch of 1 needs" in capsys.readouterr().err
