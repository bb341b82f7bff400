"""A linear layer cut by features, on `[..., features_local]`."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megasnn.comm.autograd import gather_alike, gather_channels, reduce_from_group
from megasnn.comm.codec import Wire
from megasnn.layers.context import BuildContext
from megasnn.sharding import Initialiser, Shard, declare_parameter


class ParallelLinear(nn.Module):
    """`[T, N, in/size]` -> `[T, N, out]`, or `[T, N, out/size]`.

    Style "row" multiplies the features at hand with the matching columns of the weight and sums over the ranks: the
    output is whole on every rank, and the bias is added once, after the sum. Style "column" gathers the input and
    computes this rank's output features; `gather_output` gathers those too.

    Raises:
        ValueError: features that do not divide by the number of ranks, an unknown style.
    """

    weight: Tensor
    bias: Tensor | None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        context: BuildContext,
        *,
        initialise: Initialiser,
        style: str = "row",
        bias: bool = True,
        gather_output: bool = False,
        wire: Wire = Wire.DENSE,
        initialise_bias: Initialiser | None = None,
    ) -> None:
        super().__init__()
        group = context.tensor
        if style not in ("column", "row"):
            raise ValueError(f"style must be 'column' or 'row', got {style!r}")
        if gather_output and style == "row":
            raise ValueError("a row linear layer's output is whole already; gather_output is for style 'column'")
        for name, size in (("in_features", in_features), ("out_features", out_features)):
            if size % group.size and (name == "in_features" or style == "column"):
                raise ValueError(f"{name} {size} does not divide by --tensor-model-parallel-size {group.size}")
        self.group, self.style, self.gather_output, self.wire = group, style, gather_output, wire
        self.compute_dtype = context.compute_dtype
        cut = 1 if style == "row" else 0
        shard = Shard((out_features, in_features), cut, rank=group.rank, size=group.size, initialise=initialise)
        declare_parameter(self, "weight", shard, context.dtype)
        self.register_parameter("bias", None)
        if bias:
            dim = None if style == "row" else 0
            shard = Shard((out_features,), dim, rank=group.rank, size=group.size, initialise=initialise_bias or _zeros)
            declare_parameter(self, "bias", shard, context.dtype)

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight.to(self.compute_dtype)
        if self.style == "row":
            y = reduce_from_group(F.linear(x.to(self.compute_dtype), weight), self.group)
        else:
            y = F.linear(gather_channels(x.to(self.compute_dtype), self.group, self.wire), weight)
        if self.bias is not None:
            y = y + self.bias.to(y.dtype)
        return gather_alike(y, self.group) if self.gather_output else y


def _zeros(tensor: Tensor, generator: torch.Generator) -> None:
    tensor.zero_()
