"""How kernels are compiled and started: one set of options, and sizes from a rule instead of a search.

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
TILES = 16  # that one program sums: few partial sums to fold, and enough programs for a large GPU
_REGISTERS = 64  # of a thread, for the potentials of all time steps that a backward keeps: more leave too few threads
_LOAD = 16  # bytes, the widest

NUMBERS = {torch.float32: tl.float32, torch.float64: tl.float64}
"""What kernels compute in, by the type of torch; inputs of 16 bits are computed in float32."""


def compute_type(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def lanes(dtype: torch.dtype, kept_steps: int = 1) -> int:
    """Elements of a thread, a power of two: as many as one load brings, or as registers hold.

    Args:
        kept_steps: time steps of each element that a thread keeps a potential of, up to the end of the kernel.
    """
    words = 4 if dtype == torch.float64 else 1  # two for the number, and as many for its exponential
    held = max(1, _REGISTERS // (kept_steps * words))
    return min(_LOAD // dtype.itemsize, 1 << held.bit_length() - 1)


def launch(kernel: Any, programs: int, *args: Any, **constants: Any) -> None:
    """Starts so many programs of a kernel on the device of its first tensor."""
    tensor = next(each for each in args if isinstance(each, Tensor))
    on_device = torch.cuda.device(tensor.device) if tensor.is_cuda else contextlib.nullcontext()
    with on_device:
        kernel[(programs,)](*args, **constants, **OPTIONS)


@triton.jit
def _nothing(x):
    tl.store(x, 1.0)


def try_out(device: torch.device) -> None:
    """Compiles and starts the smallest kernel. Raises whatever keeps it from that."""
    launch(_nothing, 1, torch.zeros(1, device=device))
