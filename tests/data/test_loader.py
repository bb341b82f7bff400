"""Global batches: the same sequence for every layout, number of workers and interruption; broken samples replaced."""

from __future__ import annotations

import os

import pytest
import torch

from megasnn.data.loader import order_identity
from megasnn.data.samples import BrokenSample
from tests.data.shard_files import loader, numbered, open_all, write_shard, write_shards

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
    """Samples in a micro-batch, read off its pixels: value v is normalised to v/63.75 - 2."""
    return ((micro_batch.inputs[:, 0, 0, 0] + 2) * 63.75).round().long().tolist()


def sequence(dataset, dp_size, batches, consumed=0, **changes):
    """Per global batch, its micro-batches over all data parallel ranks: (start, samples, labels)."""
    parts = [
        loader(dataset, dp_size=dp_size, dp_rank=rank, **changes).batches(consumed, batches) for rank in range(dp_size)
    ]
    return [
        [(m.start, numbers(m), m.targets.tolist()) for batch in of_ranks for m in batch.micro_batches]
        for of_ranks in zip(*parts, strict=True)
    ]


def flat(batches):
    return [number for batch in batches for _, samples, _ in batch for number in samples]


@pytest.mark.parametrize("last_batch", ["continue", "drop"])
def test_global_batches_depend_on_neither_ranks_nor_workers_nor_interruptions(dataset, last_batch):
    options = {"last_batch": last_batch, "global_batch_size": 8, "micro_batch_size": 2}
    expected = sequence(dataset, 1, 12, **options)
    position, found = 0, []
    for batches, dp_size, num_workers in ((2, 1, 0), (3, 2, 3), (1, 3, 1), (6, 2, 0)):
        found += sequence(dataset, dp_size, batches, position, num_workers=num_workers, **options)
        *_, last = loader(dataset, **options).batches(position, batches)
        position = last.consumed_samples
    assert found == expected
    if last_batch == "continue":
        torch.manual_seed(3)
        uneven = sequence(dataset, 1, 4)
        assert all(tuple((start, len(samples)) for start, samples, _ in batch) == PARTS for batch in uneven)
        assert sequence(dataset, 4, 4, num_workers=3) == uneven
        drawn = torch.rand(2)
        torch.manual_seed(3)
        assert torch.equal(torch.rand(2), drawn), "no number is drawn from torch's generator"


def test_every_sample_once_an_epoch_and_the_end_of_it_as_asked(dataset):
    options = {"global_batch_size": 10, "micro_batch_size": 5}
    everything = flat(sequence(dataset, 2, 23, **options))
    for epoch in range(10):
        assert sorted(everything[SAMPLES * epoch : SAMPLES * (epoch + 1)]) == list(range(SAMPLES))

    dropped, left_out = sequence(dataset, 2, 8, last_batch="drop", **options), set()
    for epoch in range(4):
        part = flat(dropped[2 * epoch : 2 * epoch + 2])
        assert part == everything[SAMPLES * epoch : SAMPLES * epoch + 20]
        left_out.add(tuple(sorted(set(range(SAMPLES)) - set(part))))
    assert len(left_out) == 4
    assert flat(sequence(dataset, 1, 3, shuffle=False)) == [*range(23), *range(7)]


def test_labels_ids_and_positions_belong_to_the_images(dataset, tmp_path):
    batches = list(loader(dataset).batches(20, limit=2))
    assert [(batch.size, batch.consumed_samples) for batch in batches] == [(10, 30), (10, 40)]
    for part in (part for batch in batches for part in batch.micro_batches):
        assert part.sample_ids.tolist() == numbers(part)
        assert part.targets.tolist() == [number % 3 for number in numbers(part)] and part.targets.dtype == torch.int64
        assert part.inputs.dtype == torch.float32 and part.inputs.shape == (part.size, 1, 8, 8)
    colour = open_all([write_shard(tmp_path / "c.tar", numbered(range(4)))], channels=3)
    images = next(loader(colour).batches()).micro_batches[0].inputs
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
            assert numbers(one) == numbers(a) + numbers(b)
            assert (a.start, b.start) == (one.start, one.start + a.size)


def test_ranks_that_need_no_images_open_nothing_and_others_only_their_own(dataset, monkeypatch):
    """Stages in the middle know the sample ids; the last one takes labels from the index."""
    expected, read, places = flat(sequence(dataset, 1, 4)), os.pread, []
    monkeypatch.setattr(os, "pread", lambda file, size, offset: places.append(offset) or read(file, size, offset))
    for targets in (True, False):
        stage = loader(dataset, inputs=False, targets=targets, num_workers=3)
        parts = [part for batch in stage.batches(limit=4) for part in batch.micro_batches]
        assert [number for part in parts for number in part.sample_ids.tolist()] == expected
        assert all((part.targets is not None) == targets and part.inputs is None for part in parts) and not places
    (batch,) = loader(dataset).batches(3 * SAMPLES + 16, limit=1)
    assert len(places) == batch.size == 10, "consumed samples are not read again"


def test_a_validation_pass_has_every_sample_once_and_its_workers_stay(tmp_path):
    dataset = open_all(write_shards(tmp_path, SAMPLES, per_shard=9), augment="cifar")  # which is for training alone
    for dp_size, num_workers in ((1, 0), (2, 2), (4, 0)):
        passes = sequence(dataset, dp_size, None, training=False, num_workers=num_workers)
        assert [len(flat([batch])) for batch in passes] == [10, 10, 3] and flat(passes) == list(range(SAMPLES))
    last_rank = list(loader(dataset, training=False, dp_size=2, dp_rank=1).batches())
    assert [(len(batch.micro_batches), batch.size) for batch in last_rank] == [(2, 10), (2, 10), (0, 3)]
    with_workers = loader(dataset, training=False, num_workers=2)
    for leaves in (False, False, True, False):
        passed = with_workers.batches()
        found = [numbers(part) for part in next(passed).micro_batches]
        if leaves:
            passed.close()
        else:
            found += [numbers(part) for batch in passed for part in batch.micro_batches]
            assert [number for part in found for number in part] == list(range(SAMPLES))


def test_an_epoch_without_a_batch_is_refused_and_orders_are_told_apart(dataset):
    with pytest.raises(ValueError, match="--last-batch drop.*--global-batch-size"):
        loader(dataset, global_batch_size=31, last_batch="drop")
    whole = order_identity(dataset, 8, "continue")
    assert whole == order_identity(dataset, 16, "continue") == order_identity(dataset, 23, "drop")
    assert len({whole, order_identity(dataset, 8, "drop"), order_identity(dataset, 10, "drop")}) == 3


@pytest.mark.parametrize("num_workers", [0, 3])
def test_a_broken_image_is_named_when_its_batch_is_due(broken, num_workers):
    batches = loader(open_all(broken), shuffle=False, global_batch_size=4, num_workers=num_workers).batches()
    assert numbers(next(batches).micro_batches[0]) == [0, 1, 2]
    with pytest.raises(BrokenSample) as caught:
        next(batches)
    assert all(part in str(caught.value) for part in ("'s004'", str(broken[0]), "--skip-broken-samples"))
    assert "Traceback" not in str(caught.value)


def test_the_next_sample_of_the_order_takes_the_place_and_no_other_moves(broken, dataset):
    sound, replaced = sequence(dataset, 1, 7), sequence(open_all(broken), 1, 7, skip_broken_samples=True)
    for batch, sound_batch in zip(replaced, sound, strict=True):
        for (place, samples, labels), (sound_place, due, _) in zip(batch, sound_batch, strict=True):
            assert place == sound_place and labels == [number % 3 for number in samples]
            for number, number_due in zip(samples, due, strict=True):
                assert number not in BROKEN and (number == number_due or number_due in BROKEN)
    in_file_order = {"shuffle": False, "skip_broken_samples": True}
    assert flat(sequence(open_all(broken), 1, 1, **in_file_order)) == [0, 1, 2, 3, 6, 6, 6, 7, 8, 9]
    # Sample 6 stands in for two others: each time the augmentation makes something else of it.
    batches = loader(open_all(broken, augment="cifar"), micro_batch_size=10, **in_file_order).batches()
    assert len({image.numpy().tobytes() for image in next(batches).micro_batches[0].inputs[4:7]}) == 3


@pytest.mark.parametrize(("dp_size", "num_workers"), [(1, 2), (4, 0)])
def test_all_stages_come_to_the_same_choice(broken, dp_size, num_workers):
    """First stage, last stage and a rank with both agree on labels, on skipped samples, and on the ids."""
    expected = sequence(open_all(broken), 1, 5, skip_broken_samples=True)
    options = {"skip_broken_samples": True, "dp_size": dp_size, "num_workers": num_workers}
    assert sequence(open_all(broken), batches=5, **options) == expected
    needs = ((True, True), (True, False), (False, False), (False, True))
    stages = [loader(open_all(broken), inputs=inputs, targets=targets, **options) for inputs, targets in needs]
    for batches in zip(*(stage.batches(limit=5) for stage in stages), strict=True):
        for whole, one, between, end in zip(*(batch.micro_batches for batch in batches), strict=True):
            assert end.targets.tolist() == whole.targets.tolist() == [n % 3 for n in numbers(one)]
            assert whole.skipped == one.skipped == end.skipped
            assert len({tuple(part.sample_ids.tolist()) for part in (whole, one, between, end)}) == 1
    assert stages[0].skipped == stages[1].skipped == stages[3].skipped


def test_skipped_samples_are_counted_as_they_are_handed_out(broken):
    for num_workers in (0, 2):
        stage = loader(open_all(broken), skip_broken_samples=True, shuffle=False, num_workers=num_workers)
        assert [(stage.skipped, batch.size) for batch in stage.batches(limit=3)] == [(2, 10), (3, 10), (5, 10)]
    none = open_all(write_shards(broken[0].parent, 5, per_shard=5, broken=tuple(range(5)))[:1])
    with pytest.raises(ValueError, match="none of the 5 samples"):
        next(loader(none, skip_broken_samples=True).batches())


@pytest.mark.parametrize("num_workers", [0, 2])
def test_an_evaluation_counts_no_sample_in_place_of_a_broken_one(broken, num_workers):
    """Sizes stay, as all stages know them; the places that count are those of all sound samples, each once."""
    passes = loader(open_all(broken), training=False, skip_broken_samples=True, num_workers=num_workers).batches()
    parts = [part for batch in passes for part in batch.micro_batches]
    places = [[place for place in range(part.size) if place not in part.left_out] for part in parts]
    counted = [numbers(part)[place] for part, kept in zip(parts, places, strict=True) for place in kept]
    assert counted == [number for number in range(SAMPLES) if number not in BROKEN]
    assert sum(part.size for part in parts) == SAMPLES and sum(part.skipped for part in parts) == len(BROKEN)
    trained = next(loader(open_all(broken), skip_broken_samples=True, global_batch_size=SAMPLES).batches())
    assert not any(part.left_out for part in trained.micro_batches)
