"""Samples that cannot be decoded: named, or replaced in the same way on every rank."""

from __future__ import annotations

import pytest

from megasnn.data import BrokenSample
from tests.data.shard_files import loader, open_all, write_shards
from tests.data.test_loader import numbers, sequence

BROKEN = (4, 5, 17)


@pytest.fixture
def paths(tmp_path):
    return write_shards(tmp_path, samples=23, per_shard=9, broken=BROKEN)


@pytest.mark.parametrize("num_workers", [0, 1, 3])
def test_a_broken_image_is_named_when_its_batch_is_due(paths, num_workers):
    batches = loader(open_all(paths), shuffle=False, global_batch_size=4, num_workers=num_workers).batches()
    assert numbers(next(batches).micro_batches[0]) == [0, 1, 2]
    with pytest.raises(BrokenSample, match=f"sample 's004' of shard {paths[0]} .*--skip-broken-samples"):
        next(batches)


def test_replacements_do_not_move_any_other_sample(paths, tmp_path):
    sound_folder = tmp_path / "sound"
    sound_folder.mkdir()
    sound = sequence(open_all(write_shards(sound_folder, samples=23, per_shard=9)), 1, batches=7)
    broken = sequence(open_all(paths), 1, batches=7, skip_broken=True)
    replaced = 0
    for batch, sound_batch in zip(broken, sound, strict=True):
        for (*place, samples, labels), (*sound_place, due, _) in zip(batch, sound_batch, strict=True):
            assert place == sound_place
            assert labels == [number % 3 for number in samples]
            for number, number_due in zip(samples, due, strict=True):
                assert number not in BROKEN
                assert number == number_due or number_due in BROKEN
                replaced += number != number_due
    assert replaced == sum(number in BROKEN for batch in sound for *_, due, _ in batch for number in due) >= 9


def test_the_next_one_in_the_order_takes_the_place(paths):
    (batch,) = sequence(open_all(paths), 1, 1, shuffle=False, skip_broken=True)
    assert [number for *_, samples, _ in batch for number in samples] == [0, 1, 2, 3, 6, 6, 6, 7, 8, 9]


def test_a_sample_that_stands_in_is_augmented_by_its_place(paths):
    """Sample 6 comes three times, and the augmentation makes something else of it each time."""
    options = {"skip_broken": True, "shuffle": False, "augment": "cifar", "micro_batch_size": 10}
    images = next(loader(open_all(paths), **options).batches()).micro_batches[0].images
    assert len({image.numpy().tobytes() for image in images[4:7]}) == 3


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("dp_size", [1, 2, 4])
def test_all_ranks_come_to_the_same_choice(paths, dp_size, num_workers):
    """First stage, last stage and a rank with both agree on labels, on what was skipped, and on the ids."""
    expected = sequence(open_all(paths), 1, batches=5, skip_broken=True)
    assert sequence(open_all(paths), dp_size, 5, skip_broken=True, num_workers=num_workers) == expected
    for rank in range(dp_size):
        both, first, middle, last = (
            loader(
                open_all(paths),  # its own, as every rank has: nothing is learnt from another one
                skip_broken=True,
                dp_size=dp_size,
                dp_rank=rank,
                num_workers=num_workers,
                need_images=images,
                need_labels=labels,
            )
            for images, labels in ((True, True), (True, False), (False, False), (False, True))
        )
        for batches in zip(*(stage.batches(limit=5) for stage in (both, first, middle, last)), strict=True):
            for whole, one, between, end in zip(*(batch.micro_batches for batch in batches), strict=True):
                assert end.labels.tolist() == whole.labels.tolist() == [n % 3 for n in numbers(one)]
                assert whole.skipped == one.skipped == end.skipped
                assert len({tuple(part.sample_ids.tolist()) for part in (whole, one, between, end)}) == 1
        assert both.skipped == first.skipped == last.skipped


def test_skipped_samples_are_counted_as_they_are_handed_out(paths):
    for num_workers in (0, 2):
        stage = loader(open_all(paths), skip_broken=True, shuffle=False, num_workers=num_workers)
        batches = stage.batches()
        counts = []
        for _ in range(3):
            batch = next(batches)
            counts.append(stage.skipped)
        assert counts == [2, 3, 5]
        assert f"sample 's004' of shard {paths[0]}" in [name for part in batch.micro_batches for name in part.skipped]


def test_a_data_set_without_one_sound_sample_ends(tmp_path):
    dataset = open_all(write_shards(tmp_path, samples=5, per_shard=5, broken=(0, 1, 2, 3, 4)))
    for need_images in (True, False):
        with pytest.raises(ValueError, match="none of the 5 samples can be decoded"):
            next(loader(dataset, skip_broken=True, need_images=need_images).batches())


def test_a_label_only_rank_decodes_a_sample_once(paths, monkeypatch):
    dataset = open_all(paths)
    decoded = []
    read = type(dataset)._read
    monkeypatch.setattr(type(dataset), "_read", lambda self, index: decoded.append(index) or read(self, index))
    list(loader(dataset, skip_broken=True, need_images=False).batches(limit=12))
    assert sorted(decoded) == list(range(23))
