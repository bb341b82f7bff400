"""A linear layer cut by features, on `[..., features_local]`: a convolution of images of one pixel."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from megasnn.kernels.products import Products
from megasnn.kernels.spike_codec import Content, bits_of, may_be_sparse
from megasnn.layers.context import BuildContext, context_for
from megasnn.layers.conv import Convolve, ConvPlan
from megasnn.layers.init import uniform
from megasnn.layers.row_context import MeanOverSpace
from megasnn.layers.shape_inference import content_of, count_call, join_content
from megasnn.parallel.collectives import own_channels
from megasnn.parallel.sharding import Initialiser, declare


class ParallelLinear(nn.Module):
    """`[T, N, in/size]` -> `[T, N, out]`, or `[T, N, out/size]`.

    Style "row" multiplies the features at hand with the matching columns of the weight and sums over the ranks: the
    output is whole on every rank, and the bias is added once, after the sum. Style "column" gathers the input and
    computes this rank's output features. An input that every rank has whole (pixels
    in a row) is not gathered, and style "row" takes this rank's features of it; the dry run shows it.

    Args:
        initialise, initialise_bias: fill the global weight and bias; by default as torch does.
    Raises:
        ValueError: features that do not divide by the number of ranks, an unknown style.
    """

    multiplies_by_weight = True  # and uses it in no other way: see megasnn.parallel.fsdp

    weight: Tensor
    bias: Tensor | None

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
        super().__init__()
        context = context_for(context)
        group, default = context.tp, uniform(in_features)
        if style not in ("column", "row"):
            raise ValueError(f"style must be 'column' or 'row', got {style!r}")
        for name, size in (("in_features", in_features), ("out_features", out_features)):
            if size % group.size and (name == "in_features" or style == "column"):
                raise ValueError(f"{name} {size} does not divide by --tensor-model-parallel-size {group.size}")
        self.in_features, self.out_features, self.style = in_features, out_features, style
        self.plan = ConvPlan(
            group=group,
            gather=style == "column",
            scatter=False,
            content=Content.DENSE,
            products=Products(),
            pool=1,
            sum_whole=style == "row",
        )
        self._takes_own, self._sparse = False, context.sparse_products
        self._cast_weights = context.cast_weights
        self.compute_dtype, self.weight_gradients = context.compute_dtype, context.weight_gradients
        shard = context.shard((out_features, in_features), 1 if style == "row" else 0, initialise=initialise or default)
        declare(self, "weight", shard, context.dtype)
        self.register_parameter("bias", None)
        if bias:
            dim = None if style == "row" else 0
            shard = context.shard((out_features,), dim, initialise=initialise_bias or default)
            declare(self, "bias", shard, context.dtype)

    def forward(self, x: Tensor) -> Tensor:
        if x.is_meta:
            return self._dry_run(x)
        owed = self.weight_gradients.of(self.weight)
        x = own_channels(x, self.plan.group) if self._takes_own else x
        weight = self._cast_weights.of(self.weight, self.compute_dtype)
        bits = bits_of(x) if self.plan.content is Content.SPIKES and x.is_contiguous() else None
        pixels = x.to(self.compute_dtype).reshape(1, -1, x.shape[-1], 1, 1)
        y = Convolve.apply(pixels, bits, weight, *owed, self.plan).view(*x.shape[:-1], -1)
        return y if self.bias is None else y + self.bias.to(y.dtype)

    def _dry_run(self, x: Tensor) -> Tensor:
        """Learns from the input what it holds; gives the shape of the output. Raises ValueError for features that do
        not fit, and for two inputs in one forward of which only one has all features."""
        again, is_row, size = count_call(self) > 1, self.style == "row", self.plan.group.size
        is_whole = size > 1 and x.ndim == 3 and x.shape[-1] == self.in_features
        if x.shape[-1] * size != self.in_features and not is_whole:
            raise ValueError(f"a linear layer of {self.in_features} input features is given {x.shape[-1] * size}")
        if again and is_whole != (self._takes_own or self.plan.whole):
            raise ValueError("it is called again, and of the two inputs every tensor parallel rank has only one whole")
        content = join_content(self.plan.content, content_of(x)) if again else content_of(x)
        self._takes_own = is_whole and is_row
        self.plan = replace(
            self.plan,
            content=content,
            gather=not is_row and not is_whole,
            whole=is_whole and not is_row,
            products=Products(self._sparse and may_be_sparse(content)),
        )
        features = self.out_features if is_row else self.out_features // size
        return x.new_empty((*x.shape[:-1], features), dtype=self.compute_dtype)

    def extra_repr(self) -> str:
        return f"{self.in_features}, {self.out_features}, {self.style}, {self.plan}"


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
