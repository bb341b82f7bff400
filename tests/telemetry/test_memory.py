"""Memory: peaks of ranks, bytes of tensors counted where they are taken, and what a step leaves to the next."""

from __future__ import annotations

import gc
import mmap
import weakref

import pytest
import torch

from megasnn.telemetry.allocations import AllocationCounter
from megasnn.telemetry.memory import peak_memory_mb, reset_peak_memory

CPU = torch.device("cpu")


def take(size: int) -> None:
    """Not an array: the C library may take it out of memory that others have freed, and keep it afterwards."""
    with mmap.mmap(-1, size) as block:
        block[::4096] = bytes(len(block[::4096]))


def test_a_peak_starts_anew() -> None:
    reset_peak_memory(CPU)
    before = peak_memory_mb(CPU)
    take(100_000_000)
    assert 80 < peak_memory_mb(CPU) - before < 150, "of memory that is already given back"
    reset_peak_memory(CPU)
    assert peak_memory_mb(CPU) < before + 50


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_peak_on_cuda_counts_tensors():
    device = torch.device("cuda")
    reset_peak_memory(device)
    before = peak_memory_mb(device)
    block = torch.ones(50_000_000, dtype=torch.uint8, device=device)
    del block
    assert 50 <= peak_memory_mb(device) - before < 60


class _Circle:
    def __init__(self) -> None:
        self.itself, self.tensor = self, torch.zeros(1000)


def test_bytes_of_tensors_are_counted_and_circles_from_before_stay() -> None:
    """The program's own collector would free them at any moment, and torch warn of memory that it does not know."""
    alive, counter = weakref.ref(_Circle()), AllocationCounter(CPU)
    with counter.counting():
        first = torch.zeros(1000)
        torch.zeros(500)
        lists = [[number] for number in range(100_000)]
        assert alive() is not None
    assert (counter.held, counter.peak) == (4000, 6000)
    with counter.counting():
        del first
    assert (counter.held, counter.peak) == (0, 4000)
    gc.collect()
    assert alive() is None and gc.isenabled() and len(lists) == 100_000
