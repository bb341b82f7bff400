"""Sums over memory that ranks share: in rank order, of any size, and all of it given back."""

from __future__ import annotations

import os
import time
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megasnn.comm.shared_memory import SharedMemory, shared_memory
from megasnn.comm.statistics import statistics
from megasnn.parallel_state import destroy_model_parallel, initialize_model_parallel
from tests.distributed.whole import random

LENGTHS = 5, 0, 1, 300_001  # the last one is more than one piece for each of three ranks


def _value(rank: int, length: int, dtype: torch.dtype) -> Tensor:
    return random(length, seed=10 * length + rank).to(dtype)


def _memory(dtype: torch.dtype) -> tuple[SharedMemory, list[Tensor]]:
    group = initialize_model_parallel().copies
    memory = shared_memory(group, torch.device("cpu"), dtype.itemsize * sum(LENGTHS))
    assert memory is not None
    return memory, [memory.zeros(length, dtype) for length in LENGTHS]


def _summed(dtype: torch.dtype, late: int) -> list[list[Tensor]]:
    """Twice; one rank is late, and all change their values as soon as they have the sums."""
    memory, tensors = _memory(dtype)
    rank, found = dist.get_rank(), []
    with statistics.counting():
        for _ in range(2):
            for each in tensors:
                assert each.count_nonzero() == 0
                each.copy_(_value(rank, len(each), dtype))
            time.sleep(0.05 * (rank == late))
            memory.sum(tensors, "backward")
            found.append([each.clone() for each in tensors])
            for each in tensors:
                each.zero_()
    size, traffic = dist.get_world_size(), statistics.total("data", "all_reduce")
    statistics.reset()
    assert traffic.bytes == 2 * sum(2 * (size - 1) * each.nbytes // size for each in tensors)
    destroy_model_parallel()
    return found


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_sums_are_those_in_rank_order_bit_for_bit(ranks, dtype) -> None:
    wide = torch.float32 if dtype == torch.bfloat16 else dtype
    wanted = []
    for length in LENGTHS:
        total = _value(0, length, dtype).to(wide) + _value(1, length, dtype).to(wide)
        wanted.append((total + _value(2, length, dtype).to(wide)).to(dtype))
    for found in ranks(3, _summed, dtype, 1):
        for sums in found:
            assert all(map(torch.equal, sums, wanted))


def _mapped() -> list[str]:
    """Pieces of memory that ranks share, as the system lists them."""
    return [line for line in Path("/proc/self/maps").read_text().splitlines() if "memfd:megasnn" in line]


def _given_back() -> tuple[list[int], bool]:
    """How many there are with a memory, without it but with a tensor in it, and without both; whether files stay."""
    group, files = initialize_model_parallel().copies, os.listdir("/proc/self/fd")
    memory = shared_memory(group, torch.device("cpu"), 64)
    counts = [len(_mapped())]
    values = memory.zeros(8, torch.float64)
    del memory
    values += 1
    counts.append(len(_mapped()))
    del values
    counts.append(len(_mapped()))
    stay = len(os.listdir("/proc/self/fd")) > len(files)
    destroy_model_parallel()
    return counts, stay


def test_memory_is_given_back(ranks) -> None:
    assert ranks(3, _given_back) == [([3, 1, 0], False)] * 3


def _gone() -> str:
    memory, tensors = _memory(torch.float32)
    text = ""
    if dist.get_rank() == 0:
        with pytest.raises(ConnectionError) as raised:
            memory.sum(tensors, "backward")
        text = str(raised.value)
    else:
        memory._direct.close()
    dist.barrier()
    destroy_model_parallel()
    return text


def test_a_rank_that_is_gone_is_an_error(ranks) -> None:
    assert ranks(2, _gone) == ["rank 1 is gone", ""]


def _gone_before_files() -> str:
    group, text = initialize_model_parallel().copies, ""
    assert group.held is not None and group.held.direct is not None
    if dist.get_rank():
        group.held.direct.close()
    dist.barrier()
    if not dist.get_rank():
        with open(os.devnull) as file, pytest.raises(ConnectionError) as raised:
            group.held.direct.exchange_files(file.fileno())
        text = str(raised.value)
    destroy_model_parallel()
    return text


def test_a_rank_that_is_gone_before_files_are_given_is_named(ranks) -> None:
    assert ranks(2, _gone_before_files) == ["rank 1 is gone", ""]


def _elsewhere() -> list[bool]:
    """Whether there is such a memory: on a GPU, of nothing, where one rank's system has no files in memory, where it
    has none of this size, and where nothing is in the way."""
    group, cpu = initialize_model_parallel().copies, torch.device("cpu")
    found = [shared_memory(group, torch.device("cuda"), 8), shared_memory(group, cpu, 0)]
    refused = OSError if dist.get_rank() else None
    with mock.patch.object(os, "memfd_create", wraps=os.memfd_create, side_effect=refused):
        found.append(shared_memory(group, cpu, 8))
    with mock.patch.object(os, "ftruncate", wraps=os.ftruncate, side_effect=refused):
        found.append(shared_memory(group, cpu, 8))
    found.append(shared_memory(group, cpu, 8))
    destroy_model_parallel()
    return [each is not None for each in found]


def test_where_there_is_none(ranks) -> None:
    assert ranks(2, _elsewhere) == [[False, False, False, False, True]] * 2
