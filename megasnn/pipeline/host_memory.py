"""Tensors that are moved to the host's memory and back while the device computes."""

from __future__ import annotations

import torch
from torch import Tensor


class HostMemory:
    """Moves tensors of one device to its host's memory and back.

    On a GPU the memory is pinned, and a stream of its own copies, so that neither host nor device waits; on a CPU a
    tensor is copied to another place of the same memory.

    Attributes:
        held: bytes that are there now. peak: the most that were.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self.held = self.peak = 0

    def put(self, tensor: Tensor) -> Tensor:
        """A copy in the host's memory; that of the tensor is free when nobody else holds it."""
        self.held += tensor.nbytes
        self.peak = max(self.peak, self.held)
        if self._stream is None:
            return tensor.clone()
        place = torch.empty_like(tensor, device="cpu", pin_memory=True)
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            place.copy_(tensor, non_blocking=True)
        tensor.record_stream(self._stream)
        return place

    def get(self, moved: Tensor) -> Tensor:
        """A copy on the device, which may be used after `wait`."""
        self.held -= moved.nbytes
        if self._stream is None:
            return moved.clone()
        with torch.cuda.stream(self._stream):
            tensor = torch.empty_like(moved, device=self._device)
            tensor.copy_(moved, non_blocking=True)
        tensor.record_stream(torch.cuda.current_stream(self._device))
        return tensor

    def wait(self) -> None:
        """What is computed from now on may use all that `get` has given. The host does not wait."""
        if self._stream is not None:
            torch.cuda.current_stream(self._device).wait_stream(self._stream)
