"""Input that a chunk keeps, packed, where its forward is computed again."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from functools import partial

from torch import Tensor

from megasnn.device_checks import explained
from megasnn.kernels.spike_codec import Content, remember_bits
from megasnn.layers.shape_inference import is_channels_last
from megasnn.models.description import Carried
from megasnn.pipeline.p2p import TensorSpec
from megasnn.recompute import Cache


class PackedInput:
    """Tensors that a chunk is given, as they would travel between stages: spikes as bits, counts as bytes.

    Spikes go on knowing their bits, so that layers need not pack them again.

    Args:
        tensors: of `carried`.
    Attributes:
        collected: results of exchanges in the first forward, for the second one.
    Raises:
        ValueError: outside of a step, values that do not fit their format.
    """

    def __init__(self, tensors: Sequence[Tensor], carried: Sequence[Carried]) -> None:
        self.collected: Cache = deque()
        self._packed = [_packed(tensor, each) for tensor, each in zip(tensors, carried, strict=True)]

    def restored(self) -> list[Tensor]:
        """Tensors with the memory order that they had; to be called once."""
        packed, self._packed = self._packed, []
        return [each if isinstance(each, Tensor) else _with_bits(each[0].unpack(each[1]), *each) for each in packed]


def _packed(tensor: Tensor, carried: Carried) -> Tensor | tuple[TensorSpec, Tensor]:
    if carried.content is Content.DENSE or not is_channels_last(tensor):
        return tensor
    spec = TensorSpec(tuple(tensor.shape), tensor.dtype, carried.content, tensor.requires_grad)
    with explained(partial("{}: {}".format, carried.name)):
        message = spec.pack(tensor)
    _with_bits(tensor, spec, message)
    return spec, message


def _with_bits(tensor: Tensor, spec: TensorSpec, message: Tensor) -> Tensor:
    """Tensor that knows its bits, where layers would pack it in the same order."""
    knows = spec.content is Content.SPIKES and tensor.ndim > 2 and tensor.movedim(2, -1).is_contiguous()
    return remember_bits(tensor, message) if knows else tensor
