"""Inputs that the loops cannot take."""

from __future__ import annotations

import torch
from torch import Tensor

from megasnn.kernels.torch_backend import REDUCED


def why_unusable(x: Tensor) -> str | None:
    if x.device.type != "cpu":
        return f"they run on CPU tensors, not on {x.device}"
    if x.dtype not in (torch.float32, torch.float64, *REDUCED):
        return f"they take float32, float64, bfloat16 or float16, not {x.dtype}"
    if x.numel() == 0:
        return f"the input {tuple(x.shape)} is empty"
    return None
