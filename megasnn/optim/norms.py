"""Norms of gradients and of tensors that do not depend on the layout."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from megasnn.common.grid import HOLDING_AXES, Axis
from megasnn.parallel.collectives import all_reduce_sum
from megasnn.parallel.sharding import ShardedTensor
from megasnn.parallel_state import Group


def sums_of_squares(values: Sequence[Tensor | None], device: torch.device) -> Tensor:
    """Returns the sum of squares of each tensor, float64 `[tensors]` on the device; None is zero. The host does not
    wait."""
    zero = torch.zeros((), dtype=torch.float64, device=device)
    norms = [zero] * len(values)
    present = {slot: value for slot, value in enumerate(values) if value is not None and value.numel()}
    if present:
        found = torch._foreach_norm(list(present.values()), 2, dtype=torch.float64)
        for slot, norm in zip(present, found, strict=True):
            norms[slot] = norm
    return torch.stack(norms) ** 2 if norms else zero.new_zeros(0)


class GradientNorm:
    """Global L2 norm of all gradients, every parameter counted once, on any layout.

    Each global parameter has a slot; a rank has the squares of what it holds (of an uncut parameter only one rank
    does). The slots are summed over the ranks, then in the order of the model. Splitting the model over more pipeline
    stages therefore changes no bit of the norm.

    Args:
        names: the parameters of the whole model, in order.
        tensors: those of this rank, of which it may own some rows only.
        device: of the tensors, also where this rank has none.
    """

    def __init__(self, names: Sequence[str], tensors: Sequence[ShardedTensor], device: torch.device) -> None:
        held = [entry for entry in tensors if entry.is_parameter]
        self._parameters = [entry.tensor for entry in held]
        counted = [entry for entry in held if entry.shard.is_primary() and entry.tensor.requires_grad]
        self._counted = [entry.tensor for entry in counted]
        slot_of = {name: slot for slot, name in enumerate(names)}
        self._slots = torch.tensor([slot_of[entry.name] for entry in counted], dtype=torch.int64, device=device)
        self._nothing = torch.zeros(len(names), dtype=torch.float64, device=device)

    def squares(self) -> Tensor:
        """Returns this rank's part of each slot, to be summed over all ranks: float64 on the device."""
        found = sums_of_squares([each.grad for each in self._counted], self._nothing.device)
        return self._nothing.index_copy(0, self._slots, found)

    def clip(self, norm: float | Tensor, most: float, is_void: Tensor | None = None) -> None:
        """Scales the gradients by most / (norm + 1e-6) where that is less than 1; 0 clips nothing.

        torch.nn.utils.clip_grad_norm_ and Megatron-LM do it with the same small number.

        Args:
            norm: without sizes on a device, where nothing waits for it.
            is_void: where it is true, the gradients stay as they are, so that it can be found where they went wrong.
        """
        gradients = [each.grad for each in self._parameters if each.grad is not None]
        if most <= 0 or not gradients:
            return
        scale = most / (norm + 1e-6)
        if isinstance(scale, Tensor):
            scale = scale.clamp(max=1) if is_void is None else torch.where(is_void, 1.0, scale.clamp(max=1))
            scale = scale.to(gradients[0].dtype)  # of another type, each gradient would have a kernel of its own
        elif not scale < 1:
            return
        torch._foreach_mul_(gradients, scale)


class ShardedNorms:
    """L2 norms of whole tensors, of which this rank may hold a part only.

    The squares of a tensor that is cut along an axis are summed over the ranks along it, which hold its other parts;
    `Shard.is_cut` says it. All cut tensors travel together, once for each axis.

    Args:
        tensors: this rank's, the same on all ranks that differ along holding axes only.
        groups: this rank's group along each axis that one of them is cut over.
    """

    def __init__(self, tensors: Sequence[ShardedTensor], groups: Mapping[Axis, Group]) -> None:
        self._tensors = [entry.tensor for entry in tensors]
        self._device = tensors[0].tensor.device if tensors else torch.device("cpu")
        cut = {axis: [entry.shard.is_cut(axis) for entry in tensors] for axis in HOLDING_AXES}
        self._sums = [
            (groups[axis], torch.tensor(mask, device=self._device)) for axis, mask in cut.items() if any(mask)
        ]

    def __call__(self, values: Mapping[Tensor, Tensor]) -> dict[Tensor, Tensor]:
        """Returns, by parameter, the norm of the whole tensor of which the value is this rank's part: float64, without
        sizes. Collective over the axes that tensors are cut over. The host does not wait."""
        squares = sums_of_squares([values.get(tensor) for tensor in self._tensors], self._device)
        for group, mask in self._sums:
            squares = torch.where(mask, all_reduce_sum(torch.where(mask, squares, 0.0), group), squares)
        norms = squares.sqrt()
        return {tensor: norm for tensor, norm in zip(self._tensors, norms, strict=True) if tensor in values}
