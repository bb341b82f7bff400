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
    """

    def __init__(self) -> None:
        self._kept: dict[Tensor, Tensor] | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> CastWeights:
        return self

    def of(self, weight: Tensor, dtype: torch.dtype) -> Tensor:
        """Without gradient."""
        if self._kept is None:
            return _cast(weight, dtype)
        if weight not in self._kept:
            self._kept[weight] = _cast(weight, dtype)
        return self._kept[weight]

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Inside, no weight changes: around the forwards and backwards of a step."""
        self._kept = {}
        try:
            yield
        finally:
            self._kept = None


def _cast(weight: Tensor, dtype: torch.dtype) -> Tensor:
    is_image_kernel = on_gpu(weight) and weight.ndim == 4
    order = torch.channels_last if is_image_kernel else torch.preserve_format
    return weight.detach().to(dtype, memory_format=order)
