"""Global batches: the same sequence for every layout, number of workers and interruption; broken samples replaced."""

from __future__ import annotations

import os

import pytest
import torch

from megasnn.data.dataset import BrokenSample
from megasnn.data.epochs import check_shares, order_identity
from tests.data.shard_files import image_file, loader, numbered, open_all, write_shard, write_shards

SAMPLES = 23
"""Neither the global batch of 10 nor the micro-batch of 3 divides them."""
PARTS = ((0, 3), (3, 3), (6, 3), (9, 1))
"""Start and size of the micro-batches of a global batch."""
BROKEN = (4, 5, 17)


@pytest.fixture
def dataset(tmp_path):
    return open_all(write_shards(tmp_path, SAMPLES, per_shard=9))


@pytest.fixture
def broken(tmp_path):
    (tmp_path / "broken").mkdir()
    return write_shards(tmp_path / "broken", SAMPLES, per_shard=9, broken=BROKEN)


def numbers(micro_batch):
    """The samples that lie in a micro-batch, read off its pixels: value v is normalised to v/63.75 - 2."""
    return ((micro_batch.images[:, 0, 0, 0] + 2) * 63.75).round().long().tolist()


def sequence(dataset, dp_size, batches, consumed=0, **changes):
    """Per global batch, its micro-batches over all data parallel ranks: (index, start, samples, labels)."""
    parts = [
        loader(dataset, dp_size=dp_size, dp_rank=rank, **changes).batches(consumed, batches) for rank in range(dp_size)
    ]
    return [
        [
            (micro_batch.first, micro_batch.start, numbers(micro_batch), micro_batch.labels.tolist())
            for batch in of_ranks
            for micro_batch in batch.micro_batches
        ]
        for of_ranks in zip(*parts, strict=True)
    ]


def flat(batches):
    return [number for batch in batches for _, _, samples, _ in batch for number in samples]


@pytest.mark.parametrize("last_batch", ["continue", "drop", "keep"])
def test_global_batches_depend_neither_on_ranks_nor_on_workers(dataset, last_batch):
    expected = sequence(dataset, 1, 7, last_batch=last_batch)
    if last_batch != "keep":
        assert all(tuple((start, len(samples)) for _, start, samples, _ in batch) == PARTS for batch in expected)
    for dp_size, num_workers in ((1, 1), (1, 3), (2, 0), (2, 1), (3, 0), (4, 3)):
        if last_batch == "continue" or dp_size == 1:
            assert sequence(dataset, dp_size, 7, last_batch=last_batch, num_workers=num_workers) == expected


@pytest.mark.parametrize("last_batch", ["continue", "drop", "keep"])
def test_a_run_that_changes_its_layout_on_the_way_has_the_same_sequence(dataset, last_batch):
    """Interrupted in the middle of epochs; it goes on with other ranks and workers each time."""
    options = {"last_batch": last_batch, "global_batch_size": 8, "micro_batch_size": 2}
    expected = sequence(dataset, 1, 12, **options)
    position, found = 0, []
    for batches, dp_size, num_workers in ((2, 1, 0), (3, 2, 3), (1, 3, 1), (6, 2, 0)):
        found += sequence(dataset, dp_size, batches, position, num_workers=num_workers, **options)
        *_, last = loader(dataset, **options).batches(position, batches)
        position = last.consumed_samples
    assert found == expected


def test_every_sample_once_an_epoch_and_the_end_of_it_as_asked(dataset):
    options = {"global_batch_size": 10, "micro_batch_size": 5}
    everything = flat(sequence(dataset, 2, 23, **options))
    for epoch in range(10):
        assert sorted(everything[SAMPLES * epoch : SAMPLES * (epoch + 1)]) == list(range(SAMPLES))

    kept = sequence(dataset, 1, 9, last_batch="keep", **options)
    assert [len(flat([batch])) for batch in kept] == [10, 10, 3] * 3
    assert flat(kept) == everything[:69], "the order is that of continue, cut otherwise"

    dropped, left_out = sequence(dataset, 2, 8, last_batch="drop", **options), set()
    for epoch in range(4):
        part = flat(dropped[2 * epoch : 2 * epoch + 2])
        assert part == everything[SAMPLES * epoch : SAMPLES * epoch + 20]
        left_out.add(tuple(sorted(set(range(SAMPLES)) - set(part))))
    assert len(left_out) == 4
    assert flat(sequence(dataset, 1, 3, shuffle=False)) == [*range(23), *range(7)]


def test_labels_ids_and_positions_belong_to_the_images(dataset):
    batches = list(loader(dataset).batches(20, limit=2))
    assert [(batch.size, batch.consumed_samples) for batch in batches] == [(10, 30), (10, 40)]
    for part in (part for batch in batches for part in batch.micro_batches):
        assert part.sample_ids.tolist() == numbers(part)
        assert part.labels.tolist() == [number % 3 for number in numbers(part)] and part.labels.dtype == torch.int64
        assert part.images.dtype == torch.float32 and part.images.shape == (part.size, 1, 8, 8)
    colour = open_all([write_shard(dataset._shards[0].tar.parent / "c.tar", numbered(range(4)))], channels=3)
    images = next(loader(colour).batches()).micro_batches[0].images
    assert images.is_contiguous(memory_format=torch.channels_last)


def test_ranks_share_a_micro_batch_by_samples(dataset):
    """Each reads its own, one more at most than another. Only an evaluation may have too few for everybody."""
    whole = [batch.micro_batches for batch in loader(dataset, training=False).batches()]
    parts = [loader(dataset, cp_size=2, cp_rank=rank, training=False).batches() for rank in range(2)]
    for expected, *shares in zip(whole, *parts, strict=True):
        first, second = (share.micro_batches for share in shares)
        assert [each.size for each in first] == [(each.size + 1) // 2 for each in expected]
        assert len(second) == sum(each.size > 1 for each in expected)
        for one, a, b in zip(expected, first, second, strict=False):
            assert numbers(one) == numbers(a) + numbers(b) and one.first == a.first == b.first
            assert (a.start, b.start) == (one.start, one.start + a.size)
    with pytest.raises(ValueError, match="--context-parallel-size 2"):
        check_shares(30, 10, 3, 1, 2, "continue")
    with pytest.raises(ValueError, match="--last-batch keep"):
        check_shares(3, 10, 2, 1, 2, "keep")


@pytest.mark.parametrize(("images", "labels"), [(False, True), (False, False)])
def test_ranks_that_need_no_images_open_nothing(dataset, monkeypatch, images, labels):
    """Stages in the middle know whom they compute; the last one takes labels from the index."""
    monkeypatch.setattr(os, "pread", lambda *_: pytest.fail("a sample was read"))
    stage = loader(dataset, images=images, labels=labels, num_workers=3)
    parts = [part for batch in stage.batches(limit=4) for part in batch.micro_batches]
    ids = [number for part in parts for number in part.sample_ids.tolist()]
    assert all((part.labels is not None) == labels and part.images is None for part in parts)
    monkeypatch.undo()
    assert ids == flat(sequence(dataset, 1, 4))


def test_what_was_consumed_is_not_read_again(dataset, monkeypatch):
    read, places = os.pread, []
    monkeypatch.setattr(os, "pread", lambda file, size, offset: places.append(offset) or read(file, size, offset))
    (batch,) = loader(dataset).batches(3 * SAMPLES + 16, limit=1)
    assert len(places) == batch.size == 10


def test_a_validation_pass_has_every_sample_once(dataset):
    for dp_size, num_workers in ((1, 0), (1, 2), (2, 2), (4, 0)):
        passes = sequence(dataset, dp_size, None, training=False, augment="cifar", num_workers=num_workers)
        assert [len(flat([batch])) for batch in passes] == [10, 10, 3] and flat(passes) == list(range(SAMPLES))
    assert len(sequence(dataset, 1, 2, training=False)) == 2
    last_rank = list(loader(dataset, training=False, dp_size=2, dp_rank=1).batches())
    assert [(len(batch.micro_batches), batch.size) for batch in last_rank] == [(2, 10), (2, 10), (0, 3)]


def test_workers_stay_for_the_next_pass(dataset):
    """As for the evaluations of a run; a pass that is left early ends them."""
    with_workers, alone = (loader(dataset, training=False, num_workers=n) for n in (2, 0))
    expected = [numbers(part) for batch in alone.batches() for part in batch.micro_batches]
    for _ in range(3):
        assert [numbers(part) for batch in with_workers.batches() for part in batch.micro_batches] == expected
    left = with_workers.batches()
    assert numbers(next(left).micro_batches[0]) == expected[0]
    left.close()
    assert [numbers(part) for batch in with_workers.batches() for part in batch.micro_batches] == expected


def test_augmentation_depends_neither_on_ranks_nor_workers_nor_resuming(tmp_path):
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
        found = [m.images for ranks in zip(*parts, strict=True) for batch in ranks for m in batch.micro_batches]
        return torch.cat(found)

    whole = images(1, 0, 4)
    assert torch.equal(images(4, 0, 4, num_workers=2), whole)
    assert torch.equal(images(2, 20, 2, num_workers=1), whole[20:])
    assert not torch.equal(images(1, 0, 4, seed=8), whole)
    in_file_order = images(1, 0, 3, shuffle=False)
    assert not torch.equal(in_file_order[:12], in_file_order[12:24]), "every epoch must be drawn anew"
    plain = torch.from_numpy(dataset.format.batch(list(noise.numpy())))
    assert torch.equal(images(1, 0, None, training=False), plain), "validation must not be augmented"


def test_no_number_is_drawn_from_torchs_generator(dataset):
    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)
    list(loader(dataset, num_workers=1).batches(limit=1))
    assert torch.equal(torch.rand(2), expected)


def test_what_cannot_be_cut_is_refused(dataset):
    with pytest.raises(ValueError, match="--last-batch drop.*--global-batch-size"):
        loader(dataset, global_batch_size=31, last_batch="drop")
    with pytest.raises(ValueError, match="--last-batch keep"):
        check_shares(30, 8, 2, 4, 1, "keep")
    with pytest.raises(ValueError, match="4 micro-batch"):
        check_shares(SAMPLES, 10, 3, 5, 1, "continue")


def test_a_position_in_the_data_is_not_taken_for_one_in_another_order(dataset):
    whole = order_identity(dataset, 8, "continue")
    assert whole == order_identity(dataset, 16, "keep") == order_identity(dataset, 23, "drop")
    assert len({whole, order_identity(dataset, 8, "drop"), order_identity(dataset, 10, "drop")}) == 3


@pytest.mark.parametrize("num_workers", [0, 1, 3])
def test_a_broken_image_is_named_when_its_batch_is_due(broken, num_workers):
    batches = loader(open_all(broken), shuffle=False, global_batch_size=4, num_workers=num_workers).batches()
    assert numbers(next(batches).micro_batches[0]) == [0, 1, 2]
    with pytest.raises(BrokenSample) as caught:
        next(batches)
    assert all(part in str(caught.value) for part in ("'s004'", str(broken[0]), "--skip-broken-samples"))
    assert "Traceback" not in str(caught.value)


def test_the_next_sample_of_the_order_takes_the_place_and_no_other_moves(broken, dataset):
    sound, replaced = sequence(dataset, 1, 7), sequence(open_all(broken), 1, 7, skip_broken=True)
    for batch, sound_batch in zip(replaced, sound, strict=True):
        for (*place, samples, labels), (*sound_place, due, _) in zip(batch, sound_batch, strict=True):
            assert place == sound_place and labels == [number % 3 for number in samples]
            for number, number_due in zip(samples, due, strict=True):
                assert number not in BROKEN and (number == number_due or number_due in BROKEN)
    in_file_order = sequence(open_all(broken), 1, 1, shuffle=False, skip_broken=True)
    assert flat(in_file_order) == [0, 1, 2, 3, 6, 6, 6, 7, 8, 9]


def test_a_sample_that_stands_in_is_augmented_by_its_position(broken):
    """Sample 6 comes three times, and the augmentation makes something else of it each time."""
    options = {"skip_broken": True, "shuffle": False, "augment": "cifar", "micro_batch_size": 10}
    images = next(loader(open_all(broken), **options).batches()).micro_batches[0].images
    assert len({image.numpy().tobytes() for image in images[4:7]}) == 3


@pytest.mark.parametrize(("dp_size", "num_workers"), [(1, 2), (2, 0), (4, 1)])
def test_all_stages_come_to_the_same_choice(broken, dp_size, num_workers):
    """First stage, last stage and a rank with both agree on labels, on what was skipped, and on the ids."""
    expected = sequence(open_all(broken), 1, 5, skip_broken=True)
    options = {"skip_broken": True, "dp_size": dp_size, "num_workers": num_workers}
    assert sequence(open_all(broken), batches=5, **options) == expected
    needs = ((True, True), (True, False), (False, False), (False, True))
    stages = [loader(open_all(broken), images=images, labels=labels, **options) for images, labels in needs]
    for batches in zip(*(stage.batches(limit=5) for stage in stages), strict=True):
        for whole, one, between, end in zip(*(batch.micro_batches for batch in batches), strict=True):
            assert end.labels.tolist() == whole.labels.tolist() == [n % 3 for n in numbers(one)]
            assert whole.skipped == one.skipped == end.skipped
            assert len({tuple(part.sample_ids.tolist()) for part in (whole, one, between, end)}) == 1
    assert stages[0].skipped == stages[1].skipped == stages[3].skipped


def test_skipped_samples_are_counted_as_they_are_handed_out(broken):
    for num_workers in (0, 2):
        stage = loader(open_all(broken), skip_broken=True, shuffle=False, num_workers=num_workers)
        assert [(stage.skipped, batch.size) for batch in stage.batches(limit=3)] == [(2, 10), (3, 10), (5, 10)]
    none = open_all(write_shards(broken[0].parent, 5, per_shard=5, broken=tuple(range(5)))[:1])
    for images in (True, False):
        with pytest.raises(ValueError, match="none of the 5 samples can be decoded"):
            next(loader(none, skip_broken=True, images=images).batches())


def test_samples_of_several_shapes_are_named(tmp_path):
    from megasnn.data.dataset import ShardDataset
    from megasnn.data.event_files import encode_frames
    from megasnn.data.event_frames import EventFormat
    from megasnn.data.shards import open_shard
    from megasnn.events import FrameOptions

    frames = {
        f"r{side}": {"frames.npz": encode_frames(torch.ones(2, 2, side, side).numpy()), "cls": b"0"} for side in (8, 9)
    }
    shard = open_shard(write_shard(tmp_path / "a.tar", frames))
    with pytest.raises(ValueError, match="'r9'"):
        next(loader(ShardDataset([shard], EventFormat(FrameOptions(2)), 3), shuffle=False).batches())
