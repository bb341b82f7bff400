from __future__ import annotations

import mmap
import os
import platform
import subprocess
import sys

import numpy as np
import pytest
import torch
import torch.distributed as dist

from megasnn.telemetry.memory import gather_peak_memory_mb, peak_memory_mb, reset_peak_memory

CPU = torch.device("cpu")


def test_peak_counts_memory_that_is_already_given_back():
    if not reset_peak_memory(CPU):
        pytest.skip("this system cannot reset the peak")
    before = peak_memory_mb(CPU)
    # Not an array: the C library may take it out of memory that others have freed, and keep it afterwards.
    with mmap.mmap(-1, 100_000_000) as block:
        block[::4096] = bytes(len(block[::4096]))
    after = peak_memory_mb(CPU)
    assert 80 < after - before < 150
    assert peak_memory_mb(CPU) == after
    reset_peak_memory(CPU)
    assert peak_memory_mb(CPU) < before + 50


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere the peak is getrusage's")
def test_a_rank_does_not_report_its_launchers_memory():
    block = np.ones(400_000_000, dtype=np.uint8)
    code = (
        "import torch; from megasnn.telemetry.memory import peak_memory_mb; print(peak_memory_mb(torch.device('cpu')))"
    )
    child = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    del block
    assert float(child.stdout) < 400  # torch itself takes less


def _peaks(sizes: list[int]) -> list[float]:
    """What each rank learns of all peaks, above what each had before it took so many bytes."""
    reset_peak_memory(CPU)
    before = gather_peak_memory_mb(CPU, dist.group.WORLD)
    # Not an array: see above.
    with mmap.mmap(-1, sizes[dist.get_rank()]) as block:
        block[::4096] = bytes(len(block[::4096]))
    after = gather_peak_memory_mb(CPU, dist.group.WORLD)
    return [late - early for early, late in zip(before, after, strict=True)]


def test_every_rank_learns_the_peak_of_every_rank(ranks):
    first, second = ranks(2, _peaks, [4096, 300_000_000])
    assert first == second
    assert first[0] < 50 and 270 < first[1] < 350


def test_a_group_of_one_is_this_rank():
    assert gather_peak_memory_mb(CPU, None) == pytest.approx([peak_memory_mb(CPU)], rel=0.05)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_peak_on_cuda_counts_tensors():
    device = torch.device("cuda")
    reset_peak_memory(device)
    before = peak_memory_mb(device)
    block = torch.ones(50_000_000, dtype=torch.uint8, device=device)
    del block
    assert 50 <= peak_memory_mb(device) - before < 60


STEPS = """
import resource
import torch
import megasnn

engine = megasnn.Engine(megasnn.MODELS["spikformer"](variant="spikformer_ti", image_size=32), micro_batch_size=8,
                        global_batch_size=8, train_iters=9)
images, labels = torch.rand(8, 3, 32, 32), torch.zeros(8, dtype=torch.long)
for _ in range(5):
    engine.train_step(images, labels)
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(4):
    engine.train_step(images, labels)
print((resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before) // 4)
"""


@pytest.mark.skipif(sys.platform != "linux" or platform.libc_ver()[0] != "glibc", reason="glibc's allocator")
def test_a_step_takes_the_memory_that_the_one_before_has_freed():
    def faults(**variables: str) -> int:
        plain = {name: value for name, value in os.environ.items() if not name.startswith("MALLOC_")}
        child = subprocess.run(
            [sys.executable, "-c", STEPS], env=plain | variables, capture_output=True, text=True, check=True
        )
        return int(child.stdout.split()[-1])

    assert faults() < 500
    assert faults(MALLOC_TRIM_THRESHOLD_="131072", MALLOC_MMAP_THRESHOLD_="131072") > 5000  # what the user sets stays
