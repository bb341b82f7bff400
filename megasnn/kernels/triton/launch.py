"""Compiling and starting kernels: one set of options, and sizes from rules instead of a search."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

WARPS = 4
THREADS = 32 * WARPS
# A product and a sum that are fused into one rounding can flip a spike (findings/triton_fused_multiply_add.sh).
OPTIONS = {"num_warps": WARPS, "enable_fp_fusion": False}
COLUMNS = 128  # of a tile of a kernel that sums over rows
TILES = 64  # the most that a program sums: few programs leave few partial sums, and the next kernel waits for these
MOST_UNROLLED = 16
"""Most time steps that a forward unrolls; a loop over more steps compiles sooner."""
_REGISTERS = 48  # of a thread, for potentials in a backward: with more, compilers run out of registers
_IN_A_LOOP = 40  # the same for a loop over chunks, which takes some registers for itself
_LOAD = 16  # bytes of the widest load

NUMBERS = {torch.float32: tl.float32, torch.float64: tl.float64}
"""Types of the arithmetic in torch and in Triton; inputs of 16 bits are computed in float32."""


def compute_type(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def lanes_of_type(dtype: torch.dtype) -> int:
    """Elements of a thread: those of the widest load."""
    return _LOAD // dtype.itemsize


def lanes_of_backward(dtype: torch.dtype, time_steps: int) -> int:
    """Elements of a thread in a backward, whose registers hold their potentials of several time steps."""
    widest = lanes_of_type(dtype)
    # Half as many of 16 bits, where registers then hold the potentials of all time steps. On an H200 that is as fast;
    # before Hopper registers did not suffice.
    only_half_fits = widest * time_steps > _REGISTERS >= widest // 2 * time_steps
    return widest // 2 if only_half_fits and dtype.itemsize == 2 else widest


def chunk(dtype: torch.dtype, time_steps: int) -> int:
    """Time steps of a chunk, whose potentials a backward recomputes together and holds in registers."""
    registers = lanes_of_backward(dtype, time_steps)
    if dtype == torch.float64:
        registers *= 4  # two for each number, and as many again for the exponential
    return time_steps if time_steps * registers <= _REGISTERS else _IN_A_LOOP // registers


def at_once(time_steps: int) -> int:
    """Number of steps that a forward unrolls in its loop over all: a divisor of their number."""
    return next(steps for steps in range(MOST_UNROLLED, 0, -1) if time_steps % steps == 0)


def chunk_memory(x: Tensor, time_steps: int, size: int) -> Tensor | None:
    """Memory for the potentials before each chunk but the last in a backward; None for a single chunk."""
    chunks = -(-time_steps // chunk(x.dtype, time_steps))
    return x.new_empty((chunks - 1, size), dtype=compute_type(x.dtype)) if chunks > 1 else None


def launch(kernel: Any, programs: int, *args: Any, **constants: Any) -> None:
    """Starts programs of a kernel on the device of its first tensor. constants: compile-time arguments, options."""
    # Triton takes the current device, which may be another one.
    tensor = next(each for each in args if isinstance(each, Tensor))
    on_device = torch.cuda.device(tensor.device) if tensor.is_cuda else contextlib.nullcontext()
    with on_device:
        kernel[(programs,)](*args, **{**OPTIONS, **constants})


@triton.jit
def _nothing(x):
    tl.store(x, 1.0)


def try_out(device: torch.device) -> None:
    """Compiles and starts the smallest kernel. Raises any error of triton, compiler or driver."""
    launch(_nothing, 1, torch.zeros(1, device=device))
