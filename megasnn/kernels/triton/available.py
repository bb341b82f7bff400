"""Why the Triton kernels cannot take an input: told without triton, and tried once on each GPU."""

from __future__ import annotations

import os
from functools import cache

import torch
from torch import Tensor

OLDEST = (8, 0)  # compute capability: the first with bfloat16
TAKEN = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
MOST_VALUES = 2**31 - 2**26
"""Of a time step, or of what is packed: places are 32-bit integers, and a tile may reach beyond the end."""


def interpreted() -> bool:
    """True where Triton runs its kernels in Python, on tensors of the CPU."""
    return os.environ.get("TRITON_INTERPRET", "0") in ("1", "true", "yes", "on", "y")


def refuses(x: Tensor) -> str | None:
    """Why the kernels cannot take this input `[T, ...]`, or None where they can."""
    if x.device.type != ("cpu" if interpreted() else "cuda"):
        return f"they run on CUDA tensors, not on {x.device}"
    if x.dtype not in TAKEN:
        return f"they take float32, float64, bfloat16 or float16, not {x.dtype}"
    if x.numel() == 0:
        return f"the input {tuple(x.shape)} is empty"
    if x[0].numel() > MOST_VALUES:
        return f"a time step of the input {tuple(x.shape)} has more than {MOST_VALUES} values; take fewer samples"
    return _unusable(x.device)


def usable_on(device: torch.device) -> bool:
    """True where kernels run on that device. Never on a CPU, where they are interpreted only for who asks for them."""
    return device.type == "cuda" and _unusable(device) is None


@cache
def _unusable(device: torch.device) -> str | None:
    """Why no kernel runs there: the card is too old, triton is missing, or it cannot compile and start one.

    Raises:
        torch.OutOfMemoryError, or what triton raises, when the card's memory is full: that passes, and is not kept.
    """
    if device.type == "cuda":
        capability = torch.cuda.get_device_capability(device)
        if capability < OLDEST:
            have, need = (".".join(map(str, each)) for each in (capability, OLDEST))
            return f"{torch.cuda.get_device_name(device)} has compute capability {have}, and they need {need}"
    try:
        from megasnn.kernels.triton.launch import try_out

        try_out(device)
    except Exception as error:  # whatever a missing library, compiler or driver raises
        if isinstance(error, torch.OutOfMemoryError) or "out of memory" in str(error):
            raise
        return f"triton is not usable here ({type(error).__name__}: {error})".replace("\n", " ")
    return None
