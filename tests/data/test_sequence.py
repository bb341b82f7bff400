"""The sequence of sample keys over a whole run: the same for every layout, number of workers and interruption."""

from __future__ import annotations

import os

import pytest

from megasnn.data import check_shares, order_identity
from megasnn.data.dataset import ShardDataset
from megasnn.data.event_files import EVENTS, FrameSettings
from megasnn.data.event_frames import EventFormat
from megasnn.data.shards import open_shard
from tests.data.shard_files import CLASSES, loader, write_shard
from tests.data.test_events import as_events

BATCH, SAMPLES = 8, 30  # an epoch is no whole number of batches


@pytest.fixture
def dataset(tmp_path) -> ShardDataset:
    parts = (range(11), range(11, 23), range(23, SAMPLES))
    paths = [write_shard(tmp_path / f"train-{n:05d}.tar", as_events(part)) for n, part in enumerate(parts)]
    return ShardDataset([open_shard(path, (EVENTS,)) for path in paths], EventFormat(FrameSettings(2, size=8)), CLASSES)


def keys(dataset, dp_size: int, batches: int, consumed: int = 0, **changes) -> list[list[str]]:
    """Keys of the samples in each global batch, gathered over the data parallel ranks; their content is checked."""
    options = {"global_batch_size": BATCH, "micro_batch_size": 2, "shuffle": True, **changes}
    ranks = [
        loader(dataset, dp_size=dp_size, dp_rank=rank, **options).batches(consumed, batches) for rank in range(dp_size)
    ]
    sequence = []
    for parts in zip(*ranks, strict=True):
        micro_batches = [part for batch in parts for part in batch.micro_batches]
        found = [dataset.key(index) for part in micro_batches for index in part.sample_ids.tolist()]
        labels = [label for part in micro_batches for label in part.labels.tolist()]
        assert labels == [int(key[1:]) % 3 for key in found]
        sequence.append(found)
    return sequence


@pytest.mark.parametrize("last_batch", ["continue", "drop", "keep"])
def test_one_sequence_for_all_layouts_and_workers(dataset, last_batch) -> None:
    expected = keys(dataset, 1, 10, last_batch=last_batch)
    for dp_size in (1, 2, 3) if last_batch == "keep" else (1, 2, 4):
        for num_workers in (0, 1, 3):
            assert keys(dataset, dp_size, 10, last_batch=last_batch, num_workers=num_workers) == expected


@pytest.mark.parametrize("last_batch", ["continue", "drop", "keep"])
def test_a_run_that_changes_its_layout_on_the_way_has_it_too(dataset, last_batch) -> None:
    """Interrupted in the middle of epochs; it goes on with other ranks and workers each time."""
    expected = keys(dataset, 1, 12, last_batch=last_batch)
    options = {"last_batch": last_batch, "global_batch_size": BATCH, "micro_batch_size": 2}
    position, found = 0, []
    for batches, dp_size, num_workers in ((2, 1, 0), (3, 2, 3), (1, 3, 1), (6, 2, 0)):
        found += keys(dataset, dp_size, batches, position, last_batch=last_batch, num_workers=num_workers)
        *_, last = loader(dataset, **options).batches(position, batches)
        position = last.consumed_samples
    assert found == expected


def test_every_sample_once_an_epoch_and_the_end_of_it_as_asked(dataset) -> None:
    everything = sorted(f"r{number}" for number in range(SAMPLES))
    flat = [key for batch in keys(dataset, 2, 15) for key in batch]
    for epoch in range(4):
        assert sorted(flat[SAMPLES * epoch : SAMPLES * (epoch + 1)]) == everything

    kept = keys(dataset, 2, 12, last_batch="keep")
    assert [len(batch) for batch in kept] == [8, 8, 8, 6] * 3
    for epoch in range(3):
        assert sorted(key for batch in kept[4 * epoch : 4 * epoch + 4] for key in batch) == everything
    assert [key for batch in kept for key in batch][:60] == flat[:60], "the order is that of continue, cut otherwise"

    dropped = keys(dataset, 2, 12, last_batch="drop")
    left_out = []
    for epoch in range(4):
        part = [key for batch in dropped[3 * epoch : 3 * epoch + 3] for key in batch]
        assert len(set(part)) == 24
        left_out.append(tuple(sorted(set(everything) - set(part))))
        assert part == flat[SAMPLES * epoch : SAMPLES * epoch + 24]
    assert len(set(left_out)) == 4


def test_what_was_consumed_is_not_read_again(dataset, monkeypatch) -> None:
    """Counted where bytes come from the disk; tests/data/test_workers.py counts what other processes read."""
    places = reads_of(dataset, monkeypatch)
    (batch,) = keys(dataset, 1, 1, consumed=3 * SAMPLES + 16)
    assert sorted(places) == sorted(batch)


@pytest.mark.parametrize("need_images, need_labels", [(False, True), (False, False)])
def test_ranks_that_need_no_data_open_nothing(dataset, monkeypatch, need_images, need_labels) -> None:
    """Stages in the middle know whom they compute; the last one takes labels from the index."""
    reads = reads_of(dataset, monkeypatch)
    monkeypatch.setattr(os, "open", lambda *_, **__: pytest.fail("a file was opened"))
    stage = loader(dataset, global_batch_size=BATCH, need_images=need_images, need_labels=need_labels, num_workers=3)
    ids = [part.sample_ids.tolist() for batch in stage.batches(limit=4) for part in batch.micro_batches]
    assert sum(len(part) for part in ids) == 4 * BATCH and reads == []


def reads_of(dataset, monkeypatch) -> list[str]:
    """Keys of the samples whose bytes are read from now on."""
    reads: list[str] = []
    read = type(dataset)._read
    monkeypatch.setattr(type(dataset), "_read", lambda self, index: reads.append(self.key(index)) or read(self, index))
    return reads


def test_ends_of_epochs_that_cannot_be(dataset) -> None:
    with pytest.raises(ValueError, match="--last-batch drop leaves nothing of 30 .*--global-batch-size is 31"):
        loader(dataset, global_batch_size=31, last_batch="drop")
    with pytest.raises(ValueError, match="--last-batch keep makes a batch of 6 samples, 3 micro-batch.*4 data"):
        check_shares(30, 8, 2, 4, 1, "keep")


def test_a_place_in_the_data_is_not_taken_for_one_in_another_order(dataset) -> None:
    whole = order_identity(dataset, 8, "continue")
    assert whole == order_identity(dataset, 16, "keep") == order_identity(dataset, 10, "drop")
    assert len({whole, order_identity(dataset, 8, "drop"), order_identity(dataset, 16, "drop")}) == 3
