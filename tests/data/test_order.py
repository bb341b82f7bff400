from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from megasnn.data.order import SampleOrder


@given(st.integers(1, 50), st.integers(0, 200), st.integers(1, 120), st.integers(0, 5))
def test_any_window_is_a_window_of_the_whole_sequence(samples, position, count, seed):
    whole = SampleOrder(samples, seed, shuffle=True).slots(0, position + count)
    assert SampleOrder(samples, seed, shuffle=True).slots(position, count) == whole[position:]


@given(st.integers(1, 50), st.integers(0, 5), st.booleans())
def test_every_sample_once_an_epoch(samples, seed, shuffle):
    slots = SampleOrder(samples, seed, shuffle).slots(0, 3 * samples)
    for epoch in range(3):
        part = slots[epoch * samples : (epoch + 1) * samples]
        assert sorted(slot.sample for slot in part) == list(range(samples))
        assert [(slot.epoch, slot.place) for slot in part] == [(epoch, place) for place in range(samples)]


def test_epochs_and_seeds_differ_and_file_order_stays():
    def sequence(seed, epoch, shuffle=True):
        return [slot.sample for slot in SampleOrder(100, seed, shuffle).slots(100 * epoch, 100)]

    orders = {tuple(sequence(seed, epoch)) for seed in range(3) for epoch in range(3)}
    assert len(orders) == 9
    assert sequence(1, 0, shuffle=False) == sequence(2, 5, shuffle=False) == list(range(100))


def test_places_are_uniform():
    """The mean place of sample 0 over many epochs; its deviation would be 29/sqrt(400) = 1.4."""
    order = SampleOrder(100, 3, shuffle=True)
    places = [int(np.flatnonzero(order.permutation(epoch) == 0)[0]) for epoch in range(400)]
    assert abs(np.mean(places) - 49.5) < 6


def test_the_order_is_pinned():
    """Checkpoints hold a position only, so the order under a seed must not change between versions."""
    slots = SampleOrder(10, 1234, shuffle=True).slots(5, 10)
    assert [slot.sample for slot in slots] == [1, 0, 5, 6, 9, 8, 2, 4, 3, 7]


def test_a_stretch_ends_with_its_epoch() -> None:
    stretches = SampleOrder(10, 1234, shuffle=True).stretches(5, 20)
    assert [(one.epoch, one.place, len(one.samples)) for one in stretches] == [(0, 5, 5), (1, 0, 10), (2, 0, 5)]
    assert [slot.place for slot in stretches[0].slots()] == [5, 6, 7, 8, 9]
