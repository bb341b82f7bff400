"""From the host's memory to a GPU's, without the host waiting."""

from __future__ import annotations

import torch
from torch import Tensor


def without_waiting(values: Tensor, device: torch.device) -> Tensor:
    """The tensor on a device. A GPU copies it from pinned memory, in the order of its current stream."""
    if device.type != "cuda" or values.device.type != "cpu":
        return values.to(device)
    return values.pin_memory().to(device, non_blocking=True)


def copy_without_waiting(values: Tensor, place: Tensor) -> None:
    """Copies values of the host to a place on a device, as `without_waiting` does."""
    place.copy_(values.pin_memory() if place.is_cuda else values, non_blocking=True)
