"""Forwards that are computed again: the packed input that a chunk keeps, and the choice of them for a memory budget."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import replace
from functools import partial

from torch import Tensor

from megasnn.device_checks import explained
from megasnn.kernels.spike_codec import Content, remember_bits
from megasnn.layers.shape_inference import is_channels_last
from megasnn.models.description import Carried
from megasnn.pipeline.p2p import TensorSpec
from megasnn.pipeline.peak_memory import UnitMemory, moments
from megasnn.recompute import Cache
from megasnn.schedule import Schedule
from megasnn.schedule.passes import with_recompute

MB = 1e-6


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


def within_budget(schedule: Schedule, units: Sequence[UnitMemory], budget: float) -> frozenset[int]:
    """Chooses units whose forwards are computed again so that no rank needs more than its budget.

    Greedy: units that save most bytes for each second of their time first, as many as `moments` asks for.

    Args:
        schedule: of units, complete, in which nothing is computed again.
        budget: bytes that each rank may need.
    Raises:
        ValueError: more is needed even with all of them.
    """
    chosen, least = frozenset[int](), 0
    for rank in range(schedule.ranks):
        useful = [unit for unit in schedule.chunks_of(rank) if units[unit].held > units[unit].entering]
        useful.sort(key=lambda unit: (units[unit].held - units[unit].entering) / max(units[unit].again, 1e-9))
        taken = frozenset[int]()
        need = _need(schedule, rank, units, taken)
        while need > budget and useful:
            taken |= {useful.pop()}
            need = _need(schedule, rank, units, taken)
        chosen, least = chosen | taken, max(least, need)
    if least > budget:
        raise ValueError(
            f"--memory-budget {budget * MB:g} cannot be kept with all forwards computed again: the least is "
            f"--memory-budget {math.ceil(least * MB)}; or use a smaller --micro-batch-size, or "
            "--pipeline-schedule v-half or v-min"
        )
    return chosen


def _need(schedule: Schedule, rank: int, units: Sequence[UnitMemory], chosen: Collection[int]) -> int:
    """Bytes of a rank where the forwards of these units are computed again."""
    row = with_recompute(schedule.actions[rank], lambda unit, m: unit in chosen)
    rows = (*schedule.actions[:rank], row, *schedule.actions[rank + 1 :])
    return max((each.total for each in moments(replace(schedule, actions=rows), rank, units)), default=0)
