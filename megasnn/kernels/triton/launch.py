"""Compiles and starts kernels: one set of options, and sizes from rules instead of a search."""

from __future__ import annotations

from collections.abc import Callable
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
_REGISTERS = 48  # per thread, for membrane potentials in a backward: with more, compilers run out
_IN_A_LOOP = 40  # the same for a loop over chunks, which takes some registers for itself
_LOAD = 16  # bytes of the widest load
_ALIGNED = 16  # bytes: addresses that are multiples of it are one kind of argument to Triton

TRITON_TYPES = {torch.float32: tl.float32, torch.float64: tl.float64}
"""Types of the arithmetic in torch and in Triton; inputs of 16 bits are computed in float32."""


def compute_type(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def lanes_of_type(dtype: torch.dtype) -> int:
    """Elements per thread: as many as the widest load has."""
    return _LOAD // dtype.itemsize


def lanes_of_backward(dtype: torch.dtype, time_steps: int) -> int:
    """Elements per thread in a backward, whose registers hold their potentials at several time steps."""
    widest = lanes_of_type(dtype)
    # For 16-bit types, halve the elements per thread if registers then hold all time steps. On an H200 that is as fast;
    # before Hopper registers did not suffice.
    only_half_fits = widest * time_steps > _REGISTERS >= widest // 2 * time_steps
    return widest // 2 if only_half_fits and dtype.itemsize == 2 else widest


def chunk(dtype: torch.dtype, time_steps: int) -> int:
    """Time steps in a chunk, whose potentials a backward recomputes together and holds in registers."""
    registers = lanes_of_backward(dtype, time_steps)
    if dtype == torch.float64:
        # Two for each number, and as many again for the exponential.
        registers *= 4
    return time_steps if time_steps * registers <= _REGISTERS else _IN_A_LOOP // registers


def at_once(time_steps: int) -> int:
    """Steps that a forward unrolls in its loop: a divisor of `time_steps`."""
    return next(steps for steps in range(MOST_UNROLLED, 0, -1) if time_steps % steps == 0)


def chunks_shape(dtype: torch.dtype, time_steps: int, size: int) -> tuple[int, int] | None:
    """Shape of the potentials that a backward keeps, for each chunk but the last; None for a single one."""
    chunks = -(-time_steps // chunk(dtype, time_steps))
    return (chunks - 1, size) if chunks > 1 else None


def bytes_of_bits(time_steps: int, size: int) -> int | None:
    """Number of bytes of spikes packed while they fire; None where a time step does not fill whole bytes."""
    return None if size % 8 else time_steps * size // 8


def learned_factor(w: Tensor, dtype: torch.dtype) -> Tensor:
    """The charge's learned factor; it stays on the device."""
    return w.detach().to(dtype).sigmoid()


class Launch:
    """Starts a kernel with fixed numbers and constants; a call passes the tensors.

    Args:
        kernel: takes tensors (or None), then numbers, then constants.
        numbers: argument values behind the tensors.
    """

    # Triton's `kernel[grid](...)` binds, checks and hashes all arguments in every call. It returns the compiled kernel,
    # whose `compiled[grid](...)` only starts it, as in Triton's tutorial on fused softmax (the same from 3.6 to 3.9).

    def __init__(self, kernel: Any, programs: int, *numbers: float, **constants: Any) -> None:
        self.kernel = kernel
        self.numbers = numbers
        # Compiled kernels take constants by their order.
        self.constants = {name: constants[name] for name in kernel.arg_names if name in constants}
        self._grid = (programs, 1, 1)
        self._starts: dict[tuple[Any, ...], Callable[..., None]] = {}

    def __call__(self, *tensors: Tensor | None) -> None:
        """Starts the kernel on the tensors' device, on its current stream."""
        kinds: list[Any] = []
        addresses = 0
        device = -1
        for tensor in tensors:
            if tensor is None:
                kinds.append(None)
                continue
            kinds.append(tensor.dtype)
            addresses |= tensor.data_ptr()
            device = tensor.get_device()
        if device >= 0 and device != torch.cuda.current_device():
            # Triton takes the current device.
            with torch.cuda.device(device):
                self._start_by_triton(tensors)
            return
        # Triton compiles one kernel for addresses that are multiples of 16, and others where some are not.
        if addresses % _ALIGNED:
            self._start_by_triton(tensors)
            return
        kind = (device, *kinds)
        start = self._starts.get(kind)
        if start is not None:
            start(*tensors, *self.numbers, *self.constants.values())
            return
        compiled = self._start_by_triton(tensors)
        # The interpreter compiles nothing. On AMD's GPUs the size of the memory decides, too, which kernel it is.
        if compiled is not None and torch.version.hip is None:
            self._starts[kind] = compiled[self._grid]

    def _start_by_triton(self, tensors: tuple[Tensor | None, ...]) -> Any:
        return self.kernel[self._grid](*tensors, *self.numbers, **self.constants, **OPTIONS)


@triton.jit
def _nothing(x):
    tl.store(x, 1.0)


def try_out(device: torch.device) -> None:
    """Compiles and starts the smallest kernel. Raises any error."""
    Launch(_nothing, 1)(torch.zeros(1, device=device))
