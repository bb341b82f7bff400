"""Order of samples: a function of seed and position, pinned, with every sample once an epoch."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from megasnn.data.order import SampleOrder


def positions(samples: int, seed: int, start: int, count: int, shuffle: bool = True, epoch: int | None = None):
    """Epoch, place and sample of each position."""
    order = SampleOrder(samples, seed, shuffle, samples if epoch is None else epoch)
    return [
        (span.epoch, place, sample)
        for span in order.spans(start, count)
        for place, sample in enumerate(span.samples.tolist(), span.position)
    ]


@given(st.integers(1, 50), st.integers(0, 200), st.integers(1, 120), st.integers(0, 5), st.booleans())
def test_any_window_is_one_of_the_whole_sequence_and_an_epoch_has_every_sample_once(n, position, count, seed, shuffle):
    whole = positions(n, seed, 0, position + count, shuffle)
    assert positions(n, seed, position, count, shuffle) == whole[position:]
    assert [(epoch, place) for epoch, place, _ in whole] == [divmod(each, n) for each in range(position + count)]
    for epoch in range(len(whole) // n):
        assert sorted(sample for _, _, sample in whole[epoch * n : (epoch + 1) * n]) == list(range(n))


def test_epochs_and_seeds_differ_and_file_order_stays():
    def sequence(seed, epoch, shuffle=True):
        return [sample for *_, sample in positions(100, seed, 100 * epoch, 100, shuffle)]

    assert len({tuple(sequence(seed, epoch)) for seed in range(3) for epoch in range(3)}) == 9
    assert sequence(1, 0, shuffle=False) == sequence(2, 5, shuffle=False) == list(range(100))


def test_the_order_is_pinned_and_a_shorter_epoch_leaves_out_the_end_of_its_permutation():
    """Checkpoints hold a position only, so the order under a seed must not change between versions."""
    assert [sample for *_, sample in positions(10, 1234, 5, 10)] == [1, 0, 5, 6, 9, 8, 2, 4, 3, 7]
    shorter = [sample for *_, sample in positions(10, 1234, 0, 16, epoch=8)]
    for epoch in range(2):
        whole = [sample for *_, sample in positions(10, 1234, 10 * epoch, 10)]
        assert shorter[8 * epoch : 8 * epoch + 8] == whole[:8]
