"""From the host's memory to a GPU's, without the host waiting."""

from __future__ import annotations

import torch
from torch import Tensor


def without_waiting(values: Tensor, device: torch.device) -> Tensor:
    """The tensor on a device. A GPU copies it from pinned memory, in the order of its current stream."""
    if device.type != "cuda" or values.device.type != "cpu":
        return values.to(device)
    return values.pin_memory().to(device, non_blocking=True)
