"""Sums of squares of tensors, also of those whose rows belong to several replicas."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from megasnn.grid import SUMMED_AXES
from megasnn.parallel.sharding import ShardedTensor


class Squares:
    """The sum of squares of each of some tensors.

    Args:
        tensors: this rank's, the same on all replicas; rows of all of them have owners, or of none.
        device: of the tensors, also where there are none.

    Attributes:
        parts: the axes over which what this gives is to be summed, since it is of the rows that this rank owns only.
    """

    def __init__(self, tensors: Sequence[ShardedTensor], device: torch.device) -> None:
        self._nothing = torch.zeros((), dtype=torch.float64, device=device)
        self.parts = tuple(axis for axis in SUMMED_AXES if any(entry.shard.is_cut(axis) for entry in tensors))

    def __call__(self, values: Sequence[Tensor | None]) -> Tensor:
        """The sums, float64 on the device, `[tensors]`. No value is waited for.

        Args:
            values: like the tensors, of what this rank owns; None is zero.
        """
        if not values:
            return self._nothing.new_zeros(0)
        norms = [self._nothing] * len(values)
        given = {slot: value for slot, value in enumerate(values) if value is not None and value.numel()}
        if given:
            found = torch._foreach_norm(list(given.values()), 2, dtype=torch.float64)
            for slot, norm in zip(given, found, strict=True):
                norms[slot] = norm
        return torch.stack(norms) ** 2
