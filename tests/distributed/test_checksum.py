"""The checksum of a tensor's bits: whatever changes one of them changes it."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from megasnn.kernels.layout import flat_in_memory
from megasnn.parallel.replica_check import WORDS, tensor_checksum

TYPES = [torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.uint8, torch.bool]
# Around the lengths of one part, and of several.
LENGTHS = [0, 1, 2, 3, 5, 1000, WORDS - 1, WORDS, WORDS + 1, 3 * WORDS + 7]


def random_bits(length: int, dtype: torch.dtype, seed: int) -> Tensor:
    """Any bits at all, nan with payload and -0.0 among them."""
    data = torch.randint(0, 256, (length * dtype.itemsize,), generator=torch.Generator().manual_seed(seed))
    return data.to(torch.uint8).view(dtype) if dtype is not torch.bool else data.gt(127)


@given(st.sampled_from(TYPES), st.sampled_from(LENGTHS[1:]), st.integers(0, 99), st.data())
def test_each_flipped_bit_changes_it(dtype: torch.dtype, length: int, seed: int, data: st.DataObject) -> None:
    tensor = random_bits(length, dtype, seed)
    before = tensor_checksum(tensor)
    assert before.dtype == torch.int64 and before.shape == () and tensor_checksum(tensor.clone()) == before
    bit = data.draw(st.integers(0, 8 * tensor.nbytes - 1))
    tensor.view(torch.uint8)[bit // 8] ^= 1 << bit % 8
    assert tensor_checksum(tensor) != before


@given(st.sampled_from([torch.float32, torch.int64]), st.sampled_from(LENGTHS[5:]), st.data())
def test_swapped_elements_change_it(dtype: torch.dtype, length: int, data: st.DataObject) -> None:
    """The hardest case too: two numbers that differ in their sign alone."""
    tensor = random_bits(length, dtype, 0)
    first, second = data.draw(st.lists(st.integers(0, length - 1), min_size=2, max_size=2, unique=True))
    if data.draw(st.booleans()):
        tensor[first] = tensor[second].neg() if tensor[second] else 1
    before, there = tensor_checksum(tensor), tensor[[first, second]]
    tensor[[second, first]] = there
    unchanged = torch.equal(tensor[[first, second]].view(torch.uint8), there.view(torch.uint8))
    assert (tensor_checksum(tensor) == before) == unchanged


def test_two_signs_that_change_do_not_cancel() -> None:
    ones = torch.ones(64)
    sums = set()
    for first in range(64):
        for second in range(first):
            ones[[first, second]] = -1.0
            sums.add(int(tensor_checksum(ones)))
            ones[[first, second]] = 1.0
    assert len(sums) == 64 * 63 // 2


def test_orders_of_memory() -> None:
    kernel = torch.randn(3, 4, 5, 5).contiguous(memory_format=torch.channels_last)
    flat = flat_in_memory(kernel)
    assert flat.data_ptr() == kernel.data_ptr() and tensor_checksum(kernel) == tensor_checksum(flat)
    flat[-1] += 1
    assert tensor_checksum(kernel) != tensor_checksum(kernel.contiguous())


def test_a_value_that_stays_the_same() -> None:
    """Ranks of different machines and versions compare their sums: they are fixed."""
    assert int(tensor_checksum(torch.arange(200_000, dtype=torch.float32))) == 3958306318723952128


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpu_gives_the_same() -> None:
    for dtype in TYPES:
        for length in [*LENGTHS, 130 * WORDS + 5]:
            tensor = random_bits(length, dtype, length)
            assert tensor_checksum(tensor.cuda()).cpu() == tensor_checksum(tensor)
