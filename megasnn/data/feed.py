"""Micro-batches on their way to a GPU: copied ahead, on a stream of their own, while the rank computes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from megasnn.pinned import without_waiting

if TYPE_CHECKING:
    from collections.abc import Sequence

    from megasnn.data.loader import MicroBatch


class Feed:
    """Copies to one GPU.

    What `begin` gives may be used after `hand_over` only, which makes the stream that computes wait for the copy.
    """

    def __init__(self, device: torch.device) -> None:
        self._device, self._stream = device, torch.cuda.Stream(device)

    def begin(self, *tensors: Tensor | None) -> tuple[list[Tensor | None], torch.cuda.Event]:
        """Begins to copy; any thread may call it. Returns the copies, and the event after which they are there."""
        torch.cuda.set_device(self._device)  # a new thread would pin memory by way of the first GPU
        with torch.cuda.stream(self._stream):
            copies = [None if each is None else without_waiting(each, self._device) for each in tensors]
            arrived = torch.cuda.Event()
            arrived.record(self._stream)
        return copies, arrived

    def hand_over(self, micro_batches: Sequence[MicroBatch]) -> None:
        """To the current stream of this thread. The host does not wait."""
        stream = torch.cuda.current_stream(self._device)
        for micro in micro_batches:
            if micro.arrived is not None:
                stream.wait_event(micro.arrived)
            for tensor in (micro.images, micro.labels):
                if tensor is not None:
                    tensor.record_stream(stream)  # its memory is not used again before this stream is done with it
