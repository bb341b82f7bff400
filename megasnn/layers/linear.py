"""A linear layer cut by features, on `[..., features_local]`: a convolution of images of one pixel."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor

from megasnn.kernels.products import Products
from megasnn.kernels.spike_codec import Content, bits_of
from megasnn.layers.context import BuildContext, context_for
from megasnn.layers.init import uniform
from megasnn.layers.row_context import MeanOverSpace
from megasnn.layers.weighted import Communication, ProductPlan, WeightedLayer
from megasnn.parallel.collectives import own_channels
from megasnn.parallel.sharding import Initialiser


class ParallelLinear(WeightedLayer):
    """`[T, N, in/size]` -> `[T, N, out]`, or `[T, N, out/size]`.

    Style "row" multiplies the features at hand with the matching columns of the weight and sums over the ranks: the
    output is whole on every rank, and the bias is added once, after the sum. Style "column" gathers the input and
    computes this rank's output features. An input that every rank has whole (pixels in a row) is not gathered, and
    style "row" takes this rank's features of it; the dry run shows it.

    Args:
        initialise, initialise_bias: fill the global weight and bias; by default as torch does.
    Raises:
        ValueError: features that do not divide by the number of ranks, an unknown style.
    """

    multiplies_by_weight = True  # and uses it in no other way: see megasnn.parallel.fsdp

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
        group, default = context.tp, uniform(in_features)
        if style not in ("column", "row"):
            raise ValueError(f"style must be 'column' or 'row', got {style!r}")
        weight_dim, bias_dim = (1, None) if style == "row" else (0, 0)
        communication = Communication.WHOLE_OUTPUT if style == "row" else Communication.GATHER
        super().__init__(
            context,
            context.shard((out_features, in_features), weight_dim, initialise=initialise or default),
            context.shard((out_features,), bias_dim, initialise=initialise_bias or default) if bias else None,
            ProductPlan(group, communication if group.size > 1 else Communication.NONE, Products()),
        )
        self.in_features, self.out_features, self.style = in_features, out_features, style

    def forward(self, x: Tensor) -> Tensor:
        if x.is_meta:
            return self._dry_run(x)
        if self._traceable:
            return F.linear(x, self.weight, self.bias)
        if self._has_whole_input and self.style == "row":
            x = own_channels(x, self.plan.group)
        bits = bits_of(x) if self.plan.content is Content.SPIKES and x.is_contiguous() else None
        y = self.product(x.reshape(1, -1, x.shape[-1], 1, 1), bits).view(*x.shape[:-1], -1)
        return y if self.bias is None else y + self.bias.to(y.dtype)

    def _dry_run(self, x: Tensor) -> Tensor:
        """Learns from the input what it holds; gives the shape of the output. Raises ValueError as `learn_input`."""
        whole = self.learn_input(x, -1, self.in_features)
        if whole and x.ndim != 3:
            raise ValueError(f"an input that every tensor parallel rank has whole is [T, N, C] here, got {[*x.shape]}")
        features = self.out_features // (1 if self.style == "row" else self.plan.group.size)
        return x.new_empty((*x.shape[:-1], features), dtype=self.compute_dtype)


class MeanLinear(ParallelLinear):
    """Mean over the space, then a linear layer: `[T, N, C_local, *space]` -> logits `[T, N, num_classes]`."""

    multiplies_by_weight = True  # and uses it in no other way: see megasnn.parallel.fsdp

    def __init__(
        self, in_features: int, out_features: int, context: BuildContext | None = None, **options: Any
    ) -> None:
        super().__init__(in_features, out_features, context, **options)
        self.mean = MeanOverSpace(context)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.mean(x))
