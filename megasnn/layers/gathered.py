"""Plain modules that are whole inside a layer whose other parts are cut: their inputs are gathered."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from megasnn.comm.collectives import gather_alike, own_channels
from megasnn.comm.group import Group
from megasnn.layers.channels import UNMARKED, Cut, MixedChannels, cut_of, mark_cut, mark_replicated, untracked
from megasnn.layers.context import BuildContext
from megasnn.layers.own_values import ModuleInitialiser
from megasnn.layers.plain import refuse_what_differs
from megasnn.layers.whole import describe_whole


def gather_inside(module: nn.Module, context: BuildContext, initialise: ModuleInitialiser | None) -> nn.Module:
    """Makes a plain module whole where it is, inside a layer whose other parts are cut: what it is given is gathered,
    and of what it gives every rank keeps its part of the dimension in which the first input was cut.

    Raises ValueError as `make_whole`.
    """
    refuse_what_differs(module)
    module = describe_whole(module, context, initialise)
    module.forward = _Gathered(module.forward, context.tensor, context.dtype)
    vars(module)["_is_whole"] = True
    return module


class _Gathered:
    """The forward of a whole module on a rank's parts of its inputs. The dry run shows how they are cut."""

    def __init__(self, inner: Callable[..., Any], group: Group, dtype: torch.dtype) -> None:
        self._inner, self._group, self._dtype = inner, group, dtype
        self._cuts: list[Cut | None] = []
        self._cut: Cut | None = None

    def __call__(self, *inputs: Any, **options: Any) -> Tensor:
        tensors = [x for x in (*inputs, *options.values()) if isinstance(x, Tensor)]
        if tensors and tensors[0].is_meta:
            self._cuts = [None if self._group.size == 1 or cut_of(x) is UNMARKED else cut_of(x) for x in tensors]
            self._cut = next(filter(None, self._cuts), None)
        cuts = iter(self._cuts)
        with untracked():
            given, named = tree_map_only(Tensor, lambda x: self._gathered(x, cuts), (inputs, options))
            y = self._inner(*given, **named)
            if not isinstance(y, Tensor):
                raise MixedChannels(f"it gives a {type(y).__name__}; what is whole inside a cut layer gives one tensor")
            if self._cut is None:
                return mark_replicated(y)
            cut = Cut(self._cut.dim)
            if y.ndim <= cut.dim:
                raise MixedChannels(f"it gives {list(y.shape)}, without the dimension {cut.dim} that is cut")
            if y.shape[cut.dim] % self._group.size:
                return mark_replicated(y)
            return mark_cut(_along(own_channels, y, cut, self._group), cut)

    def _gathered(self, x: Tensor, cuts: Any) -> Tensor:
        cut = next(cuts)
        x = x.to(self._dtype) if x.is_floating_point() else x
        return x if cut is None else _along(gather_alike, x, cut, self._group)

    def __deepcopy__(self, memo: dict[int, Any]) -> _Gathered:
        return self  # a process group cannot be copied


def _along(move: Callable[[Tensor, Group], Tensor], x: Tensor, cut: Cut, group: Group) -> Tensor:
    """`gather_alike` or `own_channels` along another dimension than the third, each block of it by itself."""
    first = x.movedim(cut.dim, 0)
    moved = move(first.reshape(cut.blocks, 1, len(first) // cut.blocks, -1), group)  # [blocks, 1, C, others]
    return moved.reshape(-1, *first.shape[1:]).movedim(0, cut.dim)
