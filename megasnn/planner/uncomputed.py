"""Convolutions that make their outputs and compute nothing, for counting bytes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from megasnn.kernels.convolution import Geometry, output_space

_aten = torch.ops.aten


class UncomputedConvolutions(TorchDispatchMode):
    """Makes convolutions and their gradients return zeros inside, of the right shape and memory order.

    Half of an analysis would be their products, and its bytes do not depend on a value.
    """

    def __torch_dispatch__(
        self, function: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if function is _aten.convolution.default:
            images, weight, _, stride, padding, dilation, is_transposed, _, groups = args
            if images.ndim == 4 and not is_transposed:
                geometry = Geometry(tuple(stride), tuple(padding), tuple(dilation), groups)
                space = output_space(images.shape[2:], weight.shape[2:], geometry)
                return _zeros((images.shape[0], weight.shape[0], *space), images)
        if function is _aten.convolution_backward.default:
            grad, images, weight, *_, mask = args
            if images.ndim == 4 and not mask[2]:
                of_images = _zeros(images.shape, images) if mask[0] else None
                of_weight = _zeros(weight.shape, weight) if mask[1] else None
                return of_images, of_weight, None
        return function(*args, **(kwargs or {}))


def _zeros(shape: Sequence[int], like: Tensor) -> Tensor:
    is_channels_last = like.is_contiguous(memory_format=torch.channels_last)
    order = torch.channels_last if is_channels_last else torch.contiguous_format
    return torch.empty(tuple(shape), dtype=like.dtype, memory_format=order).zero_()
