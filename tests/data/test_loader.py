from __future__ import annotations

import re

import numpy as np
import pytest
import torch

from megasnn.data import ShardDataset, check_shares
from megasnn.data.order import SampleOrder
from megasnn.data.reading import SlotReader
from tests.data.shard_files import image_file, loader, numbered, open_all, write_shard, write_shards

PARTS = ((0, 3), (3, 3), (6, 3), (9, 1))  # start and size of the micro-batches of a global batch


@pytest.fixture
def dataset(tmp_path):
    """23 samples: neither the global batch of 10 nor the micro-batch of 3 divides them."""
    return open_all(write_shards(tmp_path, samples=23, per_shard=9))


def numbers(micro_batch):
    """The samples that lie in a micro-batch, read off its pixels: value v is normalised to v/63.75 - 2."""
    return ((micro_batch.images[:, 0, 0, 0] + 2) * 63.75).round().long().tolist()


def sequence(dataset, dp_size, batches, consumed=0, **changes):
    """Per global batch, its micro-batches over all data parallel ranks: (index, start, samples, labels)."""
    parts = [
        loader(dataset, dp_size=dp_size, dp_rank=rank, **changes).batches(consumed, limit=batches)
        for rank in range(dp_size)
    ]
    return [
        [
            (micro_batch.first, micro_batch.start, numbers(micro_batch), micro_batch.labels.tolist())
            for batch in batch_of_ranks
            for micro_batch in batch.micro_batches
        ]
        for batch_of_ranks in zip(*parts, strict=True)
    ]


def test_global_batches_do_not_depend_on_ranks_or_workers(dataset):
    expected = sequence(dataset, dp_size=1, batches=7)
    for batch in expected:
        assert tuple((start, len(samples)) for _, start, samples, _ in batch) == PARTS
    for dp_size in (1, 2, 3, 4):
        for num_workers in (0, 1, 3):
            assert sequence(dataset, dp_size, batches=7, num_workers=num_workers) == expected


def test_ranks_share_a_micro_batch_by_samples(dataset):
    """Each reads its own, one more at most than another; all of them where they are to be mixed. Only an evaluation may
    have too few for everybody."""
    whole = [batch.micro_batches for batch in loader(dataset, training=False).batches()]
    parts = [loader(dataset, cp_size=2, cp_rank=rank, training=False).batches() for rank in range(2)]
    alike = loader(dataset, cp_size=2, cp_rank=1, whole=True, training=False).batches()
    for expected, *shares, all_of_it in zip(whole, *parts, alike, strict=True):
        first, second = (share.micro_batches for share in shares)
        assert [each.size for each in first] == [(each.size + 1) // 2 for each in expected]
        assert [numbers(each) for each in all_of_it.micro_batches] == [numbers(each) for each in expected]
        assert len(second) == sum(each.size > 1 for each in expected)
        for one, a, b in zip(expected, first, second, strict=False):
            assert numbers(one) == numbers(a) + numbers(b) and one.first == a.first == b.first
            assert (a.start, b.start) == (one.start, one.start + a.size)
    with pytest.raises(ValueError, match="a batch of 10 samples .* has a micro-batch of 1: too few for --context-par"):
        check_shares(30, 10, 3, 1, 2, "continue")
    with pytest.raises(ValueError, match="a batch of 3 samples .*--last-batch keep.* has a micro-batch of 1: too few"):
        check_shares(3, 10, 2, 1, 2, "keep")


def test_each_sample_is_written_before_the_next_is_decoded(dataset, monkeypatch):
    """So that memory of a sample serves the next one, also where many fill a batch."""
    order = SampleOrder(len(dataset), 7, True)
    reader = SlotReader(dataset, order, 7, None, need_images=True, skip_broken=False)
    stretches = order.stretches(0, 6)
    expected = [sample for stretch in stretches for sample in stretch.samples]
    rooms, written, decoded = list[np.ndarray](), list[int](), ShardDataset.sample

    def room(shape):
        rooms.append(np.full(shape, np.nan, np.float32))
        return rooms[-1]

    def sample(self, index, decode=None):
        written.extend(int(np.isfinite(each).all((1, 2, 3)).sum()) for each in rooms)
        return decoded(self, index, decode)

    monkeypatch.setattr(ShardDataset, "sample", sample)
    used, values = reader.read(stretches, room)
    assert values is rooms[0] and len(rooms) == 1 and used == expected
    assert written == [1, 2, 3, 4, 5] and np.isfinite(values).all()


def test_samples_of_two_shapes_are_refused_by_name(dataset, monkeypatch):
    """numpy would spread one pixel over a whole image."""
    shapes = iter([(8, 8, 3), (1, 1, 3)])
    monkeypatch.setattr(ShardDataset, "sample", lambda *_: np.zeros(next(shapes), np.uint8))
    order = SampleOrder(len(dataset), 7, True)
    reader = SlotReader(dataset, order, 7, None, need_images=True, skip_broken=False)
    second = order.stretches(0, 2)[0].samples[1]
    message = f"{dataset.describe(second)} has the shape (1, 1, 3) and the first one of its micro-batch (8, 8, 3)"
    with pytest.raises(ValueError, match=re.escape(message)):
        reader.read(order.stretches(0, 2), lambda shape: np.empty(shape, np.float32))


def test_a_run_continues_where_it_was_on_any_layout(dataset):
    expected = sequence(dataset, dp_size=1, batches=9)
    for consumed, dp_size, num_workers in ((10, 2, 0), (30, 4, 2), (80, 1, 1)):
        rest = sequence(dataset, dp_size, 9 - consumed // 10, consumed, num_workers=num_workers)
        assert rest == expected[consumed // 10 :]


def test_every_sample_once_an_epoch_with_its_own_label(dataset):
    flat = [
        pair for batch in sequence(dataset, 2, batches=23) for _, _, *both in batch for pair in zip(*both, strict=True)
    ]
    for epoch in range(10):
        assert sorted(number for number, _ in flat[23 * epoch : 23 * (epoch + 1)]) == list(range(23))
    assert all(label == number % 3 for number, label in flat)


def test_no_shuffle_is_file_order(dataset):
    flat = [
        number for batch in sequence(dataset, 1, 3, shuffle=False) for _, _, samples, _ in batch for number in samples
    ]
    assert flat == [*range(23), *range(7)]


def test_positions_and_ids(dataset):
    batches = list(loader(dataset).batches(20, limit=2))
    assert [(batch.size, batch.consumed_samples) for batch in batches] == [(10, 30), (10, 40)]
    for batch in batches:
        for micro_batch in batch.micro_batches:
            assert micro_batch.sample_ids.tolist() == numbers(micro_batch)


def test_images_are_float_and_channels_last(dataset):
    micro_batch = next(loader(dataset).batches()).micro_batches[0]
    assert micro_batch.images.shape == (3, 1, 8, 8) and micro_batch.images.dtype == torch.float32
    assert micro_batch.images.is_contiguous(memory_format=torch.channels_last)
    assert micro_batch.labels.dtype == torch.int64


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_rank_reads_only_what_its_stage_needs(dataset, monkeypatch, num_workers):
    monkeypatch.setattr(type(dataset), "sample", lambda *_: pytest.fail("an image was read"))
    expected = [[slot.sample for slot in SampleOrder(23, 7, True).slots(start, n)] for start, n in PARTS]
    for need_labels in (True, False):
        stage = loader(dataset, need_images=False, need_labels=need_labels, num_workers=num_workers)
        micro_batches = next(stage.batches()).micro_batches
        assert [part.sample_ids.tolist() for part in micro_batches] == expected
        assert all(part.images is None for part in micro_batches)
        assert all((part.labels is not None) == need_labels for part in micro_batches)


def test_a_validation_pass_has_every_sample_once(dataset):
    for dp_size in (1, 2, 4):
        for num_workers in (0, 2):
            options = {"training": False, "augment": "cifar", "num_workers": num_workers}
            passes = sequence(dataset, dp_size, None, **options)
            assert [sum(len(samples) for _, _, samples, _ in batch) for batch in passes] == [10, 10, 3]
            assert [n for batch in passes for _, _, samples, _ in batch for n in samples] == list(range(23))
    assert len(sequence(dataset, 1, 2, training=False)) == 2


def test_a_rank_without_a_share_of_the_last_validation_batch(dataset):
    batches = list(loader(dataset, training=False, dp_size=2, dp_rank=1).batches())
    assert [len(batch.micro_batches) for batch in batches] == [2, 2, 0]
    assert [batch.size for batch in batches] == [10, 10, 3]


def test_training_without_a_micro_batch_for_a_rank_is_refused(dataset):
    with pytest.raises(ValueError, match="4 micro-batch"):
        check_shares(23, 10, 3, 5, 1, "continue")


def test_augmentation_does_not_depend_on_ranks_workers_or_resuming(tmp_path):
    noise = torch.randint(0, 256, (12, 32, 32, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    samples = numbered(range(12))
    for files, pixels in zip(samples.values(), noise.numpy(), strict=True):
        files["png"] = image_file(pixels)
    dataset = open_all([write_shard(tmp_path / "a.tar", samples)], channels=3, size=32)

    def images(dp_size, consumed, limit, **changes):
        parts = [
            loader(dataset, augment="cifar", dp_size=dp_size, dp_rank=rank, **changes).batches(consumed, limit)
            for rank in range(dp_size)
        ]
        return torch.cat(
            [m.images for ranks in zip(*parts, strict=True) for batch in ranks for m in batch.micro_batches]
        )

    whole = images(1, 0, 4)
    assert len(whole) == 40
    assert torch.equal(images(4, 0, 4, num_workers=2), whole)
    assert torch.equal(images(2, 20, 2, num_workers=1), whole[20:])
    assert not torch.equal(images(1, 0, 4, seed=8), whole)
    in_file_order = images(1, 0, 3, shuffle=False)
    assert not torch.equal(in_file_order[:12], in_file_order[12:24]), "every epoch must be drawn anew"
    plain = dataset.format.to_tensor(list(noise.numpy()))
    assert torch.equal(images(1, 0, None, training=False), plain), "validation must not be augmented"
