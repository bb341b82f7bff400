"""Weights in the type and memory order that is computed in."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from megasnn.kernels.tensor_cores import on_gpu


class CastWeights:
    """What convolutions and linear layers multiply by: their weights, cast where they compute in another type.

    On a GPU those of convolutions have the channels last, as images have: cuDNN would bring them into that order in
    each call. Inside `kept` each weight is copied once; otherwise in every forward.

    Args:
        stay: whether the copies stay where they are from step to step, as graphs need it.
    """

    def __init__(self, stay: bool = False) -> None:
        self._stay, self._is_kept = stay, False
        self._copies: dict[Tensor, Tensor] = {}
        self._given: dict[Tensor, Tensor] = {}

    def __deepcopy__(self, memo: dict[int, Any]) -> CastWeights:
        return self

    def of(self, weight: Tensor, dtype: torch.dtype) -> Tensor:
        """Without gradient."""
        if weight in self._given:
            return self._given[weight]
        if not self._is_kept:
            return _cast(weight, dtype)
        if weight not in self._copies:
            self._copies[weight] = _cast(weight, dtype)
        return self._copies[weight]

    @property
    def held_bytes(self) -> int:
        """Of the copies that there are; a weight that is computed with as it is has none."""
        copies = [copy for weight, copy in self._copies.items() if copy.data_ptr() != weight.data_ptr()]
        return sum(each.nbytes for each in copies)

    def give(self, weight: Tensor, values: Tensor) -> None:
        """From now on these values, of the type that is computed in, are multiplied by."""
        self._given[weight] = values

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Inside, no weight changes: around the forwards and backwards of a step."""
        if self._stay:
            self._refresh()
        else:
            self._copies = {}
        self._is_kept = True
        try:
            yield
        finally:
            self._is_kept = False
            if not self._stay:
                self._copies = {}

    def _refresh(self) -> None:
        apart = {w: copy for w, copy in self._copies.items() if (w.dtype, w.stride()) != (copy.dtype, copy.stride())}
        if apart:
            with torch.no_grad():
                torch._foreach_copy_(list(apart.values()), list(apart))


def _cast(weight: Tensor, dtype: torch.dtype) -> Tensor:
    is_image_kernel = on_gpu(weight) and weight.ndim == 4
    order = torch.channels_last if is_image_kernel else torch.preserve_format
    return weight.detach().to(dtype, memory_format=order)
