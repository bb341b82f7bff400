"""Linear layers with sharded features, on `[T, N, C_local]`."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor

from megasnn.kernels.products import Products
from megasnn.kernels.spike_codec import bits_of
from megasnn.layers.context import BuildContext, context_for
from megasnn.layers.init import uniform
from megasnn.layers.row_context import MeanOverSpace
from megasnn.layers.weighted import Communication, ProductOptions, WeightedLayer
from megasnn.parallel.collectives import own_channels
from megasnn.parallel.sharding import Initialiser


class ParallelLinear(WeightedLayer):
    """Linear layer: `[T, N, in/size]` -> `[T, N, out]` (style "row") or `[T, N, out/size]` ("column").

    Style "row" multiplies own features by the weight's matching columns and sums over the ranks. Style "column" gathers
    the input, unless the dry run finds it whole.

    Args:
        initialise, initialise_bias: fill the global tensors; default: torch's.
    Raises:
        ValueError: features that ranks do not divide; an unknown style.
    """

    multiplies_by_weight = True

    def __init__(
        self,
        in_features: int,
        out_features: int,
        context: BuildContext | None = None,
        *,
        initialise: Initialiser | None = None,
        style: str = "row",
        bias: bool = True,
        initialise_bias: Initialiser | None = None,
    ) -> None:
        context = context_for(context)
        if style not in ("column", "row"):
            raise ValueError(f"style must be 'column' or 'row', got {style!r}")
        # Column cuts the output features.
        weight_dim = 0
        bias_dim: int | None = 0
        communication = Communication.GATHER
        if style == "row":
            weight_dim = 1
            bias_dim = None
            communication = Communication.WHOLE_OUTPUT
        if context.tp.size == 1:
            communication = Communication.NONE
        default = uniform(in_features)
        weight_shard = context.shard((out_features, in_features), weight_dim, initialise=initialise or default)
        bias_shard = None
        if bias:
            bias_shard = context.shard((out_features,), bias_dim, initialise=initialise_bias or default)
        super().__init__(context, weight_shard, bias_shard, ProductOptions(context.tp, communication, Products()))
        self.in_features = in_features
        self.out_features = out_features
        self.style = style
        # Ranks that divide the rows of images compute the same here, where space is gone.
        self._is_counted = self._is_counted and context.counts_logits

    def forward(self, x: Tensor) -> Tensor:
        if x.is_meta:
            return self._dry_run(x)
        if self._traceable:
            return F.linear(x, self.weight, self.bias)
        if self._has_whole_input and self.style == "row":
            # Style "row" multiplies own features only.
            x = own_channels(x, self.options.group)
        images = x.reshape(1, -1, x.shape[-1], 1, 1)
        if self.observer is not None:
            self.tell_observer(x.reshape(len(x), -1, x.shape[-1], 1, 1))
        bits = None
        # Bits are in the order of memory, which is that of the rows for a contiguous tensor only.
        if self.options.content.is_bits and x.is_contiguous():
            bits = bits_of(x, self.options.content)
        y = self.apply_weight(images, bits).view(*x.shape[:-1], -1)
        # Style "row" adds the bias after the sum over ranks, so once.
        return y if self.bias is None else y + self.bias.to(y.dtype)

    def _dry_run(self, x: Tensor) -> Tensor:
        is_whole = self.note_input(x, -1, self.in_features)
        if is_whole and x.ndim != 3:
            raise ValueError(f"an input that every tensor parallel rank has whole is [T, N, C] here, got {[*x.shape]}")
        features = self.out_features
        if self.style == "column":
            features //= self.options.group.size
        return x.new_empty((*x.shape[:-1], features), dtype=self.compute_dtype)


class MeanLinear(ParallelLinear):
    """Mean over space, then a linear layer: `[T, N, C_local, *space]` -> logits `[T, N, num_classes]`."""

    multiplies_by_weight = True

    def __init__(
        self, in_features: int, out_features: int, context: BuildContext | None = None, **options: Any
    ) -> None:
        super().__init__(in_features, out_features, context, **options)
        self.mean = MeanOverSpace(context)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.mean(x))
