"""Inputs and devices that the Triton kernels cannot take: found without triton, once for each GPU."""

from __future__ import annotations

import os
from functools import cache

import torch
from torch import Tensor

OLDEST = (8, 0)
"""The first compute capability with bfloat16."""
TAKEN = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
MOST_VALUES = 2**31 - 2**26
"""Of a time step or a packed tensor: indices have 32 bits, and a tile may reach beyond the end."""


def interpreted() -> bool:
    """True if Triton runs kernels in Python, on CPU tensors."""
    return os.environ.get("TRITON_INTERPRET", "0") in ("1", "true", "yes", "on", "y")


def why_unusable(x: Tensor) -> str | None:
    """Reason against this input `[T, ...]`, or None."""
    needed = "cpu" if interpreted() else "cuda"
    if x.device.type != needed:
        return f"they run on CUDA tensors, not on {x.device}"
    if x.dtype not in TAKEN:
        return f"they take float32, float64, bfloat16 or float16, not {x.dtype}"
    if x.numel() == 0:
        return f"the input {tuple(x.shape)} is empty"
    if x[0].numel() > MOST_VALUES:
        return f"a time step of the input {tuple(x.shape)} has more than {MOST_VALUES} values; take fewer samples"
    return _unusable(x.device)


def usable_on(device: torch.device) -> bool:
    """False for every CPU."""
    # Interpreted kernels must be asked for.
    return device.type == "cuda" and _unusable(device) is None


@cache
def _unusable(device: torch.device) -> str | None:
    """Reason against a device: the card is too old, or triton is missing, does not compile or start.

    Raises torch.OutOfMemoryError, or triton's error, when the card's memory is full.
    """
    if device.type == "cuda":
        capability = torch.cuda.get_device_capability(device)
        if capability < OLDEST:
            name = torch.cuda.get_device_name(device)
            found = f"{capability[0]}.{capability[1]}"
            return f"{name} has compute capability {found}, and they need {OLDEST[0]}.{OLDEST[1]}"
    try:
        from megasnn.kernels.triton.launch import try_out

        try_out(device)
    except Exception as error:
        # A missing library, compiler or driver may raise anything.
        if isinstance(error, torch.OutOfMemoryError) or "out of memory" in str(error):
            # A full memory may pass, so it must not be cached.
            raise
        return f"triton is not usable here ({type(error).__name__}: {error})".replace("\n", " ")
    return None
