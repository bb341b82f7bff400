"""What a chunk keeps of a forward that is computed again: its input, packed, and what its layers found."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from functools import partial

from torch import Tensor

from megasnn.device_checks import explained
from megasnn.kernels.spike_codec import Content, remember_bits
from megasnn.models.description import Carried
from megasnn.pipeline.p2p import TensorDescriptor, message_of
from megasnn.recompute import Cache


class KeptInput:
    """The tensors that a chunk is given, as they would travel between stages: spikes as bits, counts as bytes.

    Spikes go on knowing their bits, so that layers need not pack them again.

    Args:
        tensors: of `carried`.
    Attributes:
        findings: what the first forward found, for the second one.
    Raises:
        ValueError: outside of a step, values that do not fit their format.
    """

    def __init__(self, tensors: Sequence[Tensor], carried: Sequence[Carried]) -> None:
        self.findings: Cache = deque()
        self._tensors = [
            _packed(tensor, each.name, each.content) for tensor, each in zip(tensors, carried, strict=True)
        ]

    def restored(self) -> list[Tensor]:
        """The tensors, in their memory order; to be called once."""
        tensors, self._tensors = self._tensors, []
        return [_with_bits(descriptor.restore(payload), payload, descriptor) for descriptor, payload in tensors]


def _packed(tensor: Tensor, name: str, content: Content) -> tuple[TensorDescriptor, Tensor]:
    descriptor = TensorDescriptor.of(tensor, content)
    with explained(partial("{}: {}".format, name)):
        bits = message_of(tensor, descriptor)
    _with_bits(tensor, bits, descriptor)
    return descriptor, bits


def _with_bits(tensor: Tensor, payload: Tensor, descriptor: TensorDescriptor) -> Tensor:
    """The tensor, which knows its bits where layers would pack it in the same order: with its channels last."""
    is_spikes = descriptor.content is Content.SPIKES and tensor.ndim > 2
    return remember_bits(tensor, payload) if is_spikes and tensor.movedim(2, -1).is_contiguous() else tensor
