"""Order of samples: a function of seed and position, pinned, with every sample once an epoch."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from megasnn.data.order import SampleOrder


def order(samples: int, seed: int, shuffle: bool = True, epoch: int | None = None) -> SampleOrder:
    return SampleOrder(samples, seed, shuffle, samples if epoch is None else epoch)


@given(st.integers(1, 50), st.integers(0, 200), st.integers(1, 120), st.integers(0, 5), st.booleans())
def test_any_window_is_one_of_the_whole_sequence_and_an_epoch_has_every_sample_once(n, position, count, seed, shuffle):
    whole = order(n, seed, shuffle).positions(0, position + count)
    assert order(n, seed, shuffle).positions(position, count) == whole[position:]
    for epoch in range(len(whole) // n):
        part = whole[epoch * n : (epoch + 1) * n]
        assert sorted(each.sample for each in part) == list(range(n))
        assert [(each.epoch, each.place) for each in part] == [(epoch, place) for place in range(n)]


def test_epochs_and_seeds_differ_and_file_order_stays():
    def sequence(seed, epoch, shuffle=True):
        return [position.sample for position in order(100, seed, shuffle).positions(100 * epoch, 100)]

    assert len({tuple(sequence(seed, epoch)) for seed in range(3) for epoch in range(3)}) == 9
    assert sequence(1, 0, shuffle=False) == sequence(2, 5, shuffle=False) == list(range(100))


def test_the_order_is_pinned_and_a_shorter_epoch_leaves_out_the_end_of_its_permutation():
    """Checkpoints hold a position only, so the order under a seed must not change between versions."""
    positions = order(10, 1234).positions(5, 10)
    assert [position.sample for position in positions] == [1, 0, 5, 6, 9, 8, 2, 4, 3, 7]
    shorter = order(10, 1234, epoch=8).positions(0, 16)
    for epoch in range(2):
        whole = order(10, 1234).permutation(epoch).tolist()
        assert [position.sample for position in shorter[8 * epoch : 8 * epoch + 8]] == whole[:8]
