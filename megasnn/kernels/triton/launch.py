"""Compiling and starting of kernels: one set of options, and sizes from a rule instead of a search.

Multiplications and additions are never fused into one rounding: a spike could flip against the reference.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

WARPS = 4
THREADS = 32 * WARPS
OPTIONS = {"num_warps": WARPS, "enable_fp_fusion": False}
COLUMNS = 128  # of a tile of a kernel that sums over rows
TILES = 64  # that one program sums at most: few partial sums to fold, which the next kernel waits for
MOST_UNROLLED = 16
"""Time steps that a forward writes out one after the other; of more there are loops, which compile sooner."""
_REGISTERS = 48  # of a thread, for the potentials that a backward keeps: with more, compilers run out of them
_IN_A_LOOP = 40  # the same where chunks are gone through in a loop, which takes some for itself
_LOAD = 16  # bytes, the widest

NUMBERS = {torch.float32: tl.float32, torch.float64: tl.float64}
"""What kernels compute in, by the type of torch; inputs of 16 bits are computed in float32."""


def compute_type(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def lanes_of_type(dtype: torch.dtype) -> int:
    """Elements of a thread: as many as one load brings."""
    return _LOAD // dtype.itemsize


def lanes_of_backward(dtype: torch.dtype, time_steps: int) -> int:
    """Elements of a thread in a backward, which keeps their potentials: of 16 bits half as many, where registers then
    hold those of all time steps. On an H200 that is as fast, and before Hopper registers did not suffice."""
    widest = lanes_of_type(dtype)
    fits = widest * time_steps > _REGISTERS >= widest // 2 * time_steps
    return widest // 2 if fits and dtype.itemsize == 2 else widest


def chunk(dtype: torch.dtype, time_steps: int) -> int:
    """Time steps of which a backward keeps the potentials at once: all, or as many as registers hold in a loop. It
    computes them again, chunk after chunk."""
    # Double precision's exponential takes as many.
    registers = lanes_of_backward(dtype, time_steps) * (4 if dtype == torch.float64 else 1)
    return time_steps if time_steps * registers <= _REGISTERS else _IN_A_LOOP // registers


def at_once(time_steps: int) -> int:
    """Number of steps that a forward writes out, in a loop over all: a divisor of their number."""
    return next(steps for steps in range(MOST_UNROLLED, 0, -1) if time_steps % steps == 0)


def chunk_memory(x: Tensor, time_steps: int, size: int) -> Tensor | None:
    """Memory where a backward keeps the potentials before each chunk but the last; None where there is one chunk."""
    chunks = -(-time_steps // chunk(x.dtype, time_steps))
    return x.new_empty((chunks - 1, size), dtype=compute_type(x.dtype)) if chunks > 1 else None


def launch(kernel: Any, programs: int, *args: Any, **constants: Any) -> None:
    """Starts so many programs of a kernel on the device of its first tensor. Args: constants: options among them."""
    tensor = next(each for each in args if isinstance(each, Tensor))
    on_device = torch.cuda.device(tensor.device) if tensor.is_cuda else contextlib.nullcontext()
    with on_device:
        kernel[(programs,)](*args, **{**OPTIONS, **constants})


@triton.jit
def _nothing(x):
    tl.store(x, 1.0)


def try_out(device: torch.device) -> None:
    """Compiles and starts the smallest kernel. Raises whatever keeps it from that."""
    launch(_nothing, 1, torch.zeros(1, device=device))
