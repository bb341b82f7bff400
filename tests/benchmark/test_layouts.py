"""Benchmarks: rows by their names, figures from made-up clocks, short runs of each kind, and flags without sense."""

from __future__ import annotations

import json
from importlib.metadata import version
from itertools import islice
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader

from megasnn.config import DataConfig
from megasnn.config.checks import ConfigError
from tests.data.shard_files import as_events, loader, open_datasets, write_shard
from tools.benchmark.__main__ import main
from tools.benchmark.data import Samples
from tools.benchmark.harness import run, table
from tools.benchmark.layouts import Layouts, figures
from tools.benchmark.plans import Plans, layout_of
from tools.benchmark.rows import parse_row
from tools.benchmark.steps import Facts, Turn

TINY = ["--dimensions", *"embed_dim=32 num_heads=2 depth=1 image_size=16 time_steps=2".split()]
SHORT = "--global-batch-size 4 --micro-batches 2 --rounds 1 --steps 1".split()


@pytest.mark.parametrize(
    ("name", "ranks", "replicas", "pieces", "threads"),
    [
        ("megasnn@all", 1, 1, None, 4),
        ("pp4:3@2", 4, 1, 3, 2),
        ("tp2dp3pp2", 12, 3, None, 1),
        ("dp2zero1:2", 2, 2, 2, 1),
    ],
)
def test_a_name_says_the_layout(name: str, ranks: int, replicas: int, pieces: int | None, threads: int) -> None:
    row = parse_row(name, 4)
    assert (row.ranks, row.replicas, row.pieces, row.threads) == (ranks, replicas, pieces, threads)


def test_options_become_flags() -> None:
    asked = parse_row("cp2rows-always", 4).parallel("auto")
    assert (asked.context_parallel_size, asked.context_parallel_cut, asked.recompute) == (2, "rows", "always")
    assert parse_row("pp2-v-half", 4).parallel("auto").pipeline_schedule == "v-half"
    assert parse_row("dp2zero1", 4).parallel("auto").use_distributed_optimizer
    assert layout_of(parse_row("pp2-zbv", 4), 4).chunks == 2 and layout_of(parse_row("wp2", 4), 4).grid.dp_shard == 2


@pytest.mark.parametrize(
    "name",
    ["", "dp", "dp0", "xp2", "dp2dp2", "spikingjelly2", "dp2rows", "tp2zero1", "spikingjelly:4", "pp2@", "dp2-zbv"],
)
def test_what_is_no_row_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="--rows"):
        parse_row(name, 8)


@pytest.mark.parametrize(
    ("case", "named"),
    [
        (Layouts(rows=("tp5",)), "--tensor-model-parallel-size 5"),
        (Layouts(rows=("pp2",), global_batch_size=4), "row pp2"),
        (Layouts(rows=("cp2",), global_batch_size=1), "row cp2"),
        (Layouts(rounds=0), "--rounds"),
        (Layouts(dimensions=("width=3",)), "width"),
        (Plans(rows=("spikingjelly",)), "row spikingjelly"),
        (Plans(rows=("dp4",)), "row dp4"),
    ],
)
def test_what_cannot_be_measured_is_refused(case: Layouts, named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        run(case)


def test_ratios_are_taken_round_by_round() -> None:
    """The machine is half as fast in the second round."""
    case = Layouts(rows=("spikingjelly", "megasnn", "dp2"), global_batch_size=8)
    works = {row: case.work(row) for row in case.parsed()}
    sj, one, dp2 = works
    turns = {
        sj: [[Turn([3.0, 3.0])], [Turn([6.0, 6.0])]],
        one: [[Turn([2.0, 2.0])], [Turn([4.0, 4.0])]],
        dp2: [[Turn([1.0, 0.5]), Turn([0.5, 1.0], 0.8)], [Turn([2.0, 2.0]), Turn([2.0, 2.0])]],
    }
    of_ranks = [Facts(100.0, 10.0 * each, 3, 1.5 * each, None, None, None, None) for each in range(2)]
    facts = {row: of_ranks[: row.ranks] for row in works}
    found = figures(works, turns, facts)
    assert found[1]["x_spikingjelly"].least == found[1]["x_spikingjelly"].most == 1.5
    assert found[2]["x_megasnn"].least == found[2]["x_megasnn"].most == 2.0
    assert found[2]["step_ms"].median == 1500 and found[2]["samples_per_s"] == pytest.approx(8 / 1.5)
    assert (found[2]["needed_mb"], found[2]["moved_mb"]) == (10.0, 1.5)
    assert table(case.columns, found).splitlines()[3].split()[:3] == ["dp2", "2", "1"]


@pytest.mark.usefixtures("forked_ranks")
def test_a_short_run_of_schedules(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log, rows = tmp_path / "logs" / "benchmark.jsonl", ["spikingjelly", "megasnn", "megasnn:2", "pp2-zbv"]
    assert main(["--pipeline", *TINY, *SHORT, "--output", str(log), "--rows", *rows]) == 0
    theirs, one, same, zbv = (json.loads(line) for line in log.read_text().splitlines())
    assert [each["row"] for each in (theirs, one, same, zbv)] == rows
    assert theirs["needed_mb"] is None and one["x_megasnn"]["median"] == 1 and one["calls"] == 0
    assert zbv["ranks"] == 2 and zbv["calls"] > 0 and 0 < zbv["needed_mb"] and zbv["layers"].count("|") == 3
    assert zbv["schedule"] == "zbv" and zbv["simulated_ms"]["median"] > 0 < zbv["x_simulated"]["median"]
    parts = {part: one[f"{part}_ms"]["median"] for part in ("forward", "backward", "transfers", "forward_backward")}
    assert 0 < parts["forward"] + parts["backward"] + parts["transfers"] <= parts["forward_backward"]
    # The second stage waits for a forward of the first one.
    assert zbv["transfers_ms"]["median"] > 0.1 and zbv["recompute_ms"] is None
    assert min(theirs[f"{part}_ms"]["median"] for part in ("forward", "backward", "optimizer")) > 0
    assert theirs["transfers_ms"] is None
    assert same["x_same"]["median"] == 1 and zbv["x_same"]["median"] > 0 and 0 < zbv["packed"] < 1
    assert one["flags"]["global_batch_size"] == 4 and one["versions"]["torch"] == version("torch")
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines() if " (" in line][: len(rows)] == rows


@pytest.mark.usefixtures("forked_ranks")
def test_a_short_run_of_plans(tmp_path: Path) -> None:
    log = tmp_path / "log"
    assert main(["--plans", *TINY, *SHORT, "--output", str(log), "--rows", "tp2"]) == 0
    tp2 = json.loads(log.read_text())
    assert tp2["foreseen_ms"] > 0 < tp2["foreseen_mb"] and tp2["mb_x_foreseen"] == pytest.approx(1, abs=0.3)


def test_wrong_flags_and_a_failing_rank_are_told(tmp_path: Path, capsys, monkeypatch: pytest.MonkeyPatch) -> None:
    assert main(["--rows", "tp5"]) == 2 and "--tensor-model-parallel-size 5" in capsys.readouterr().err
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    log = tmp_path / "log"
    assert main([*TINY, *SHORT, "--output", str(log), "--device", "cuda", "--rows", "dp2"]) == 1
    assert "--device cuda" in capsys.readouterr().err and not log.exists()


def lines(log: Path) -> list[dict]:
    return [json.loads(line) for line in log.read_text().splitlines()]


def test_kernels(tmp_path: Path) -> None:
    log, threads = tmp_path / "log", torch.get_num_threads()
    flags = "--kernels --pool --neuron-backend torch --channels 3 8 --mebibytes 0.05 --rounds 2 --output".split()
    assert main([*flags, str(log)]) == 0
    found = lines(log)
    assert [each["row"] for each in found] == ["3 channels", "8 channels"] and torch.get_num_threads() == threads
    assert all(each[name]["median"] > 0 for each in found for name in ("copy_ms", "forward_copies", "backward_copies"))


@pytest.fixture
def shard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MEGASNN_CACHE", str(tmp_path / "cache"))
    return write_shard(tmp_path / "a.tar", as_events(range(12), sensor=(16, 16)))


def test_the_plain_side_gives_the_same_batches(shard: Path) -> None:
    dataset = open_datasets(DataConfig(data_path=str(shard)), (3, 2, 16, 16), 3).train
    samples = Samples(dataset)
    ours = loader(dataset, shuffle=False, global_batch_size=4, micro_batch_size=4).batches()
    theirs = DataLoader(samples, 4, collate_fn=samples.collate)
    for batch, (frames, labels) in zip(islice(ours, 3), theirs, strict=True):
        (micro_batch,) = batch.micro_batches
        assert torch.equal(micro_batch.inputs, frames) and torch.equal(micro_batch.targets, labels)


def test_data(shard: Path, tmp_path: Path) -> None:
    log = tmp_path / "log"
    small = "--image-size 16 --time-steps 2 --batch-size 3 --samples 6 --rounds 1 --workers 0 1 --augment dvs".split()
    assert main(["--data", "--kinds", "events", "--data-path", str(shard), *small, "--output", str(log)]) == 0
    found = lines(log)
    assert [each["row"] for each in found] == ["events, 0 workers", "events, 1 worker"]
    assert all(each["ratio"]["median"] > 0 < each["samples_per_s"]["median"] for each in found)


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (["--kernels", "--channels", "0"], "--channels 0"),
        (["--data", "--workers", "-1"], "--workers -1"),
        (["--data", "--data-path", "nowhere.tar"], "--kinds"),
    ],
)
def test_flags_without_sense(flags: list[str], named: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(flags) == 2 and named in capsys.readouterr().err
