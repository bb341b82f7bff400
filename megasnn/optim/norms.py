"""Norms of gradients and of tensors that do not depend on the layout."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from megasnn.comm.collectives import all_reduce_sum
from megasnn.comm.group import Group
from megasnn.grid import HOLDING_AXES, Axis
from megasnn.sharding import ShardedTensor

_MODEL_AXES = tuple(axis for axis in HOLDING_AXES if axis != "data")


class GradientNorm:
    """The global L2 norm of all gradients, every parameter counted once, on any layout.

    Each global parameter has a slot; a rank has the squares of what it holds (of an uncut parameter only one
    tensor-parallel rank does). The slots are summed over the ranks that together hold one model, then in the order of
    the model. Splitting the model over more pipeline stages therefore changes no bit of the norm.

    Args:
        names: the parameters of the whole model, in order.
        tensors: those of this rank.
        device: of the tensors, also where this rank has none.
    """

    def __init__(self, names: Sequence[str], tensors: Sequence[ShardedTensor], device: torch.device) -> None:
        held = [entry for entry in tensors if entry.is_parameter]
        self._names, self._parameters = names, [entry.tensor for entry in held]
        self._counted = [(entry.name, entry.tensor) for entry in held if entry.shard.is_primary(_MODEL_AXES)]
        self._nothing = torch.zeros((), dtype=torch.float64, device=device)

    def squares(self) -> Tensor:
        """This rank's part of each slot: float64 on the device. A gradient that is not there is zero."""
        gradients = {name: each.grad for name, each in self._counted if each.grad is not None}
        norms = torch._foreach_norm(list(gradients.values()), 2, dtype=torch.float64) if gradients else ()
        of_name = dict(zip(gradients, norms, strict=True))
        return torch.stack([of_name.get(name, self._nothing) for name in self._names]) ** 2

    def of(self, squares: Sequence[float]) -> float:
        """The norm, of the summed slots. NaN and infinity come out as such."""
        return math.sqrt(math.fsum(squares))

    def clip(self, norm: float, most: float) -> None:
        """Scales the gradients by most / (norm + 1e-6) where that is less than 1; 0 clips nothing.

        torch.nn.utils.clip_grad_norm_ and Megatron-LM do it with the same small number.
        """
        scale = most / (norm + 1e-6)
        if most <= 0 or not scale < 1:
            return
        if gradients := [each.grad for each in self._parameters if each.grad is not None]:
            torch._foreach_mul_(gradients, scale)


class ShardedNorms:
    """The L2 norms of whole tensors, of which this rank may hold a part only.

    The squares of a tensor that is cut along an axis are summed over the ranks along it, which hold its other parts;
    `Shard.is_cut` says it. All cut tensors travel together, once for each axis.

    Args:
        tensors: this rank's, the same on all ranks that differ along holding axes only.
        groups: this rank's group along each axis that one of them is cut over.
    """

    def __init__(self, tensors: Sequence[ShardedTensor], groups: Mapping[Axis, Group]) -> None:
        self._slots = {entry.tensor: slot for slot, entry in enumerate(tensors)}
        cut = {axis: [entry.shard.is_cut(axis) for entry in tensors] for axis in HOLDING_AXES}
        device = tensors[0].tensor.device if tensors else torch.device("cpu")
        self._sums = [(groups[axis], torch.tensor(mask, device=device)) for axis, mask in cut.items() if any(mask)]
        self._empty = torch.zeros(len(tensors), dtype=torch.float64, device=device)

    def __call__(self, values: Mapping[Tensor, Tensor]) -> dict[Tensor, Tensor]:
        """By parameter, the norm of the whole tensor of which the value is this rank's part: float64, without sizes.

        Collective over the axes that tensors are cut over. No value is waited for.
        """
        squares = self._empty.clone()
        for parameter, value in values.items():
            squares[self._slots[parameter]] = torch.linalg.vector_norm(value, dtype=torch.float64) ** 2
        for group, mask in self._sums:
            squares = torch.where(mask, all_reduce_sum(torch.where(mask, squares, 0.0), group, "step"), squares)
        norms = squares.sqrt()
        return {parameter: norms[self._slots[parameter]] for parameter in values}
