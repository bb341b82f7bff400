"""Gradient and tensor norms, equal on every layout."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from megasnn.common.grid import HOLDING_AXES, Axis
from megasnn.parallel.collectives import all_reduce_sum
from megasnn.parallel.sharding import ShardedTensor
from megasnn.parallel_state import Group


def sums_of_squares(values: Sequence[Tensor | None], device: torch.device) -> Tensor:
    """Per tensor, float64 `[tensors]` on the device; 0 for None. The host does not wait."""
    zero = torch.zeros((), dtype=torch.float64, device=device)
    norms = [zero] * len(values)
    present = {slot: value for slot, value in enumerate(values) if value is not None and value.numel()}
    if present:
        found = torch._foreach_norm(list(present.values()), 2, dtype=torch.float64)
        for slot, norm in zip(present, found, strict=True):
            norms[slot] = norm
    return torch.stack(norms) ** 2 if norms else zero.new_zeros(0)


class GradientNorm:
    """Global L2 norm over all gradients; every parameter counts once.

    Args:
        names: the whole model's parameters, in order. Each has a slot.
    """

    def __init__(self, names: Sequence[str], tensors: Sequence[ShardedTensor], device: torch.device) -> None:
        parameters = [entry for entry in tensors if entry.is_parameter]
        counted = [entry for entry in parameters if entry.shard.is_primary() and entry.tensor.requires_grad]
        self._parameters = [entry.tensor for entry in parameters]
        self._counted = [entry.tensor for entry in counted]
        slot_of = {name: slot for slot, name in enumerate(names)}
        self._slots = torch.tensor([slot_of[entry.name] for entry in counted], dtype=torch.int64, device=device)
        self._nothing = torch.zeros(len(names), dtype=torch.float64, device=device)

    def squares(self) -> Tensor:
        """This rank's sum of squares in each slot, float64 on the device."""
        # Slots are summed over the ranks, then in model order: the number of pipeline stages changes no bit.
        found = sums_of_squares([each.grad for each in self._counted], self._nothing.device)
        return self._nothing.index_copy(0, self._slots, found)

    def clip(self, norm: float | Tensor, most: float, must_skip: Tensor | None = None) -> None:
        """Scales by most / (norm + 1e-6), if below 1, as torch.nn.utils.clip_grad_norm_.

        Args:
            norm: a scalar on the device avoids a host wait.
            most: largest norm; 0 disables clipping.
            must_skip: if true, gradients stay as they are, for the search for values that are not finite.
        """
        gradients = [each.grad for each in self._parameters if each.grad is not None]
        if most <= 0 or not gradients:
            return
        scale = most / (norm + 1e-6)
        if isinstance(scale, Tensor):
            scale = scale.clamp(max=1)
            if must_skip is not None:
                scale = torch.where(must_skip, 1.0, scale)
            # With a scale of another type, torch would launch one kernel for each gradient.
            scale = scale.to(gradients[0].dtype)
        elif not scale < 1:
            return
        torch._foreach_mul_(gradients, scale)


class ShardedNorms:
    """Whole tensors' L2 norms from this rank's shards.

    Args:
        tensors: the same on all ranks along the holding axes.
        groups: this rank's, along each axis that cuts a tensor.
    """

    def __init__(self, tensors: Sequence[ShardedTensor], groups: Mapping[Axis, Group]) -> None:
        self._tensors = [entry.tensor for entry in tensors]
        self._device = tensors[0].tensor.device if tensors else torch.device("cpu")
        self._sums: list[tuple[Group, Tensor]] = []
        for axis in HOLDING_AXES:
            is_cut = [entry.shard.is_cut(axis) for entry in tensors]
            if any(is_cut):
                self._sums.append((groups[axis], torch.tensor(is_cut, device=self._device)))

    def __call__(self, values: Mapping[Tensor, Tensor]) -> dict[Tensor, Tensor]:
        """Float64 scalars by parameter, without a host wait. Collective."""
        squares = sums_of_squares([values.get(tensor) for tensor in self._tensors], self._device)
        for group, is_cut in self._sums:
            # One exchange for all tensors.
            total = all_reduce_sum(torch.where(is_cut, squares, 0.0), group)
            squares = torch.where(is_cut, total, squares)
        norms = squares.sqrt()
        return {tensor: norm for tensor, norm in zip(self._tensors, norms, strict=True) if tensor in values}
