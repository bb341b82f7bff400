"""Bytes of tensors, counted where they are taken and given back."""

from __future__ import annotations

import gc
import weakref

import torch

from megasnn.telemetry.allocations import AllocationCounter

CPU = torch.device("cpu")


class _Circle:
    def __init__(self) -> None:
        self.itself, self.tensor = self, torch.zeros(1000)


def test_what_is_held_and_the_most_that_was() -> None:
    counter = AllocationCounter(CPU)
    with counter.counting():
        first = torch.zeros(1000)
        torch.zeros(500)
    assert (counter.held, counter.peak) == (4000, 6000)
    with counter.counting():
        del first
    assert (counter.held, counter.peak) == (0, 4000)


def test_circles_from_before_stay_while_memory_is_counted() -> None:
    """The program's own collector would free them at any moment, and torch warn of memory that it does not know."""
    alive = weakref.ref(_Circle())
    with AllocationCounter(CPU).counting():
        lists = [[number] for number in range(100_000)]
        assert alive() is not None
    gc.collect()
    assert alive() is None and gc.isenabled() and len(lists) == 100_000
