"""Plain modules that are whole inside a layer whose other parts are cut: their input is gathered."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from megasnn.comm.collectives import gather_alike, own_channels
from megasnn.comm.group import Group
from megasnn.layers.channels import all_channels, channel_dim, refuse_whole
from megasnn.layers.context import BuildContext
from megasnn.layers.own_values import ModuleInitialiser
from megasnn.layers.plain import refuse_what_differs
from megasnn.layers.swapped import class_name, is_multi_step
from megasnn.layers.whole import describe_whole


def gather_inside(module: nn.Module, context: BuildContext, initialise: ModuleInitialiser | None) -> nn.Module:
    """Makes a plain module whole where it is, inside a layer whose other parts are cut: what it is given is gathered,
    and of what it gives every rank keeps its own channels.

    Raises ValueError as `make_whole`.
    """
    refuse_what_differs(module)
    dim = 2 if is_multi_step(module) else 1 if class_name(module) else None
    module = describe_whole(module, context, initialise)
    module.forward = _Gathered(module.forward, context.tensor, context.dtype, dim)
    return module


class _Gathered:
    """The forward of a whole module on this rank's channels, which are the dimension `dim` of its input."""

    def __init__(self, inner: Callable[..., Any], group: Group, dtype: torch.dtype, dim: int | None) -> None:
        self._inner, self._group, self._dtype, self._dim = inner, group, dtype, dim

    def __call__(self, x: Tensor) -> Tensor:
        if x.is_meta:
            refuse_whole(x, self._group.size)
            self._dim = self._dim or channel_dim(x) or 2
        with all_channels():
            y = self._inner(self._with_time(gather_alike, x.to(self._dtype)))
            if not isinstance(y, Tensor):
                raise ValueError(f"it gives a {type(y).__name__}; what is whole inside a cut layer gives one tensor")
            return self._with_time(own_channels, y)

    def _with_time(self, move: Callable[[Tensor, Group], Tensor], x: Tensor) -> Tensor:
        return move(x, self._group) if self._dim == 2 else move(x.unsqueeze(0), self._group).squeeze(0)

    def __deepcopy__(self, memo: dict[int, Any]) -> _Gathered:
        return self  # a process group cannot be copied
