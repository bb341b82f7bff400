"""Kernels and data: short runs, and flags without sense."""

from __future__ import annotations

import json
from itertools import islice
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader

from megasnn.config import DataConfig
from tests.data.shard_files import as_events, loader, open_datasets, write_shard
from tools.benchmark.__main__ import main
from tools.benchmark.data import Samples


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
        assert torch.equal(micro_batch.images, frames) and torch.equal(micro_batch.labels, labels)


def test_data(shard: Path, tmp_path: Path) -> None:
    log = tmp_path / "log"
    small = "--image-size 16 --time-steps 2 --batch-size 3 --samples 6 --rounds 1 --workers 0 1 --augment dvs".split()
    assert main(["--data", "--kinds", "events", "--data-path", str(shard), *small, "--output", str(log)]) == 0
    found = lines(log)
    assert [each["row"] for each in found] == ["events, 0 workers", "events, 1 workers"]
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
