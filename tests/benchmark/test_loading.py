"""The benchmark of the loader: both sides load the same samples, and steps of training wait for real data."""

from __future__ import annotations

import json
from itertools import islice
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader

from megasnn.config import DataConfig
from megasnn.data import open_datasets
from tests.data.shard_files import as_events, loader, write_shard
from tools.benchmark.loading import Samples
from tools.benchmark.program import main


@pytest.fixture
def shard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MEGASNN_CACHE", str(tmp_path / "cache"))
    return write_shard(tmp_path / "a.tar", as_events(range(12), sensor=(16, 16)))


def test_the_other_side_gives_the_same_batches(shard: Path) -> None:
    dataset = open_datasets(DataConfig(data_path=str(shard)), (3, 2, 16, 16), 3).train
    samples = Samples(dataset)
    ours = loader(dataset, shuffle=False, global_batch_size=4, micro_batch_size=4).batches()
    theirs = DataLoader(samples, 4, collate_fn=samples.collate)
    for batch, (frames, labels) in zip(islice(ours, 3), theirs, strict=True):
        (micro_batch,) = batch.micro_batches
        assert torch.equal(micro_batch.images, frames) and torch.equal(micro_batch.labels, labels)


def test_a_run(shard: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    log = tmp_path / "log.jsonl"
    small = "--image-size 16 --time-steps 2 --channels 4,P --batch-size 3 --samples 6 --rounds 1 --steps 1".split()
    arguments = ["--data", "--data-path", str(shard), *small, "--workers", "0", "1", "--output", str(log)]
    assert main([*arguments, "--augment", "dvs"]) == 0
    assert main([*arguments, "--augment", "dvs", "--steps", "0", "--workers", "1"]) == 0
    told = capfd.readouterr()
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    assert [line["row"] for line in lines] == ["events, 0 workers", "events, 1 workers", "events, 1 workers"]
    assert all(line["samples_per_s"]["median"] > 0 < line["dataloader_samples_per_s"]["median"] for line in lines)
    assert all(line["decoding_ratio"]["median"] > 0 for line in lines) and "x decoding" in told.out
    assert 0 < lines[0]["waiting_share"] < 1 and lines[2]["waiting_share"] is None
    assert "of it waiting" in told.out


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        (["--samples", "8", "--batch-size", "9"], "--samples 8 are less than one --batch-size 9"),
        (["--workers", "-1"], "--workers -1 must be at least 0"),
        (["--data-path", "nowhere.tar"], "nowhere.tar"),
    ],
)
def test_flags_without_sense(flags: list[str], problem: str, capsys) -> None:
    assert main(["--data", *flags]) == 2
    assert problem in capsys.readouterr().err
